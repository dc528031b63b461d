"""This rank's compression state between steps, and the rules for when it changes.

The state consists of **residuals** (error feedback: the compression error, added to later steps),
which differ between ranks, and **warm starts** (PowerSGD's factors), which are the same on all
ranks. A step only *proposes* new state, which becomes current when the step commits. The proposals
of an aborted step are discarded, so that the repeated step starts from the same state.

If a rank dies or leaves, its residuals are lost. This loss is bounded: a residual is at most a
fixed multiple of the gradients of the last steps (Karimireddy et al. 2019, lemma 3: E||e||^2 <= 4
(1 - d) / d^2 max ||g||^2 for a compressor that contracts by d), so each such event loses at most
one update of this size. A joiner starts without residuals. It receives the warm starts together
with the model.

May be used only on the training thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from shoal_common.errors import CorruptDataError
from torch.nn import functional

RESIDUAL = "residual"
"""Name of the slot for this rank's residual: the part of its own gradients that has not been sent
yet."""
_OWNED = "owned@"
"""Prefix of slot names for residuals of the sums that this rank computes. The position of the
summed part in the bucket follows."""
_WARM = "warm."


class BucketMemory:
    """Compression state of one bucket: its residuals and warm starts."""

    def __init__(self) -> None:
        self._committed: dict[str, torch.Tensor] = {}
        self._proposed: dict[str, torch.Tensor] = {}
        self._spare: dict[str, torch.Tensor] = {}
        """Buffers with obsolete state, which may be overwritten."""
        self._sound = False
        """True if the step's result was finite on all ranks."""
        self._rounds = 0

    def next_round(self) -> int:
        """Returns how many times this bucket has already been exchanged in the step, and counts one
        more exchange. Each exchange thus draws different random numbers."""
        self._rounds += 1
        return self._rounds - 1

    def resize(self, numel: int) -> None:
        """Adapts the state to a bucket of `numel` elements. Only the padding at the bucket's end
        may have changed."""
        for slot in [slot for slot in self._committed if slot == RESIDUAL]:
            owed = self._committed[slot]
            if owed.numel() != numel:
                self._committed[slot] = functional.pad(
                    owed[:numel], (0, max(0, numel - owed.numel()))
                )

    def compensated_gradient(
        self, values: torch.Tensor, owned: slice | None = None
    ) -> torch.Tensor:
        """Returns `values` plus the residual, in memory that becomes the new residual. The caller
        must therefore subtract the values that it sends from the result.

        `owned`: range of the bucket whose sum this rank computes. If this rank computed other sums
        before, because the group had different ranks, the residuals of those sums are added as
        well. A residual that does not fit is dropped, because the bucket's layout has changed.
        """
        first = RESIDUAL not in self._proposed
        target = self._compensated(RESIDUAL, values)
        for slot, owed in self._committed.items() if first and owned is not None else ():
            start = int(slot.removeprefix(_OWNED)) if slot.startswith(_OWNED) else None
            if (
                start is not None
                and slice(start, start + owed.numel()) != owned
                and start + owed.numel() <= target.numel()
            ):
                target[start : start + owed.numel()] += owed
        return target

    def compensated_sum(self, start: int, values: torch.Tensor) -> torch.Tensor:
        """Returns `values` plus the residual, like `compensated_gradient`, but for the sum that
        this rank computes. `start`: where the summed part starts in the bucket."""
        return self._compensated(f"{_OWNED}{start}", values)

    def _compensated(self, slot: str, values: torch.Tensor) -> torch.Tensor:
        owed = self._newest(slot)
        target = _like(self._proposed.get(slot), values)
        if target is None:
            target = _like(self._spare.pop(slot, None), values)
        if target is None:
            target = torch.empty_like(values)
        self._proposed[slot] = target
        owed = _like(owed, values)
        return torch.add(values, owed, out=target) if owed is not None else target.copy_(values)

    def warm_start(self, number: int) -> torch.Tensor | None:
        """Returns the initial factor of this step, which is the previous step's final factor; None
        if there is none."""
        return self._newest(f"{_WARM}{number}")

    def propose_warm_start(self, number: int, factor: torch.Tensor) -> None:
        """Proposes `factor` as the initial factor of the next step."""
        self._proposed[f"{_WARM}{number}"] = factor

    def keep_warm_starts(self) -> None:
        """Keeps the current warm starts beyond this step, except those for which this step has
        proposed new ones."""
        for slot, factor in self.items(warm=True):
            self._proposed.setdefault(slot, factor)

    def conclude(self, *, finite: bool) -> None:
        """Records the outcome of the bucket's reduction. If the result is not finite, the step's
        proposals are discarded, because they would carry NaN into all later steps."""
        if finite:
            self._sound = True
        else:
            self.rollback()

    def commit(self) -> None:
        """Makes the step's proposed state current. If it is not finite, discards it instead."""
        if not self._sound and not all(is_finite(tensor) for tensor in self._proposed.values()):
            self._proposed = {}
        if self._proposed:
            self._spare, self._committed = self._committed, self._proposed
        self._proposed, self._sound, self._rounds = {}, False, 0

    def rollback(self) -> None:
        """Discards the proposed state."""
        self._spare.update(self._proposed)
        self._proposed, self._sound, self._rounds = {}, False, 0

    def _newest(self, slot: str) -> torch.Tensor | None:
        """Returns the newest tensor in a slot, which may be a proposal: if a bucket is reduced
        twice in a step, the second reduction continues from the first."""
        found = self._proposed.get(slot)
        return self._committed.get(slot) if found is None else found

    def rescale(self, factor: float) -> None:
        """Multiplies residuals by `factor`."""
        for _, owed in self.items(warm=False):
            owed.mul_(factor)

    def items(self, *, warm: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the committed warm starts if `warm`, otherwise the committed residuals."""
        return (
            (slot, tensor)
            for slot, tensor in self._committed.items()
            if slot.startswith(_WARM) is warm
        )

    def replace(self, found: Mapping[str, torch.Tensor], *, warm: bool) -> None:
        """Replaces all warm starts if `warm`, otherwise all residuals."""
        kept = dict(self.items(warm=not warm))
        self.rollback()
        self._spare = {}
        self._committed = kept | {slot: tensor.detach().clone() for slot, tensor in found.items()}


class Memory:
    """Compression state of all buckets of a model, by bucket index."""

    def __init__(self) -> None:
        self._buckets: dict[int, BucketMemory] = {}

    def bucket(self, index: int) -> BucketMemory:
        """Returns a bucket's memory, which is created on first use."""
        return self._buckets.setdefault(index, BucketMemory())

    def commit(self) -> None:
        """Makes the state proposed by the step current, in all buckets."""
        for memory in self._buckets.values():
            memory.commit()

    def rollback(self) -> None:
        """Discards the state proposed by the step, in all buckets."""
        for memory in self._buckets.values():
            memory.rollback()

    def forget(self, first: int, end: int) -> None:
        """Drops the state of the buckets with indices from `first` to `end` - 1. Called when these
        buckets are about to change."""
        for index in [index for index in self._buckets if first <= index < end]:
            del self._buckets[index]

    def resize(self, index: int, numel: int) -> None:
        """Adapts the state of a bucket to a new size; see `BucketMemory.resize`."""
        if index in self._buckets:
            self._buckets[index].resize(numel)

    def rescale(self, factor: float) -> None:
        """Multiplies all residuals by `factor`."""
        for memory in self._buckets.values():
            memory.rescale(factor)

    def state_dict(self, *, warm: bool) -> dict[str, torch.Tensor]:
        """Returns the committed warm starts if `warm`, otherwise the residuals, by "bucket/slot".
        The tensors are references, valid until the next commit."""
        return {
            f"{index}/{slot}": tensor
            for index, memory in self._buckets.items()
            for slot, tensor in memory.items(warm=warm)
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor], *, warm: bool) -> None:
        """Loads copies of the tensors returned by `state_dict`, replacing all warm starts if
        `warm`, otherwise all residuals.

        Raises:
            CorruptDataError (STATE_INVALID): a name or tensor is not one that `state_dict` would
                return; nothing is changed.
        """
        found: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in state.items():
            index, _, slot = name.partition("/")
            known = (
                slot.removeprefix(_WARM).isdecimal()
                if warm
                else slot == RESIDUAL or slot.removeprefix(_OWNED).isdecimal()
            )
            if not (index.isdecimal() and known and tensor.dtype is torch.float32):
                raise CorruptDataError(
                    f"compression state has {name!r} of dtype {tensor.dtype}; expected float32 "
                    "tensors named as in state_dict",
                    reason="STATE_INVALID",
                )
            found.setdefault(int(index), {})[slot] = tensor
        for number in self._buckets.keys() | found.keys():
            self.bucket(number).replace(found.get(number, {}), warm=warm)


def is_finite(values: torch.Tensor) -> bool:
    """Returns whether the sum of the values is finite, which is much cheaper to check than each
    element. If the sum overflows although all values are finite, a residual is not updated, which
    does no harm."""
    return math.isfinite(float(values.sum(dtype=torch.float32)))


def _like(found: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor | None:
    """Returns `found` if it has the same size and device as `values`, otherwise None."""
    return (
        found
        if found is not None and found.shape == values.shape and found.device == values.device
        else None
    )
