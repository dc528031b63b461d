"""Implements `shoal.whole_batch`: gathers the rows of all ranks' samples in a pass, for losses that
compare samples with one another.

A contrastive loss over only one rank's samples is a different loss, with fewer pairs. Each rank
therefore receives all ranks' rows and computes the loss of the entire batch. Gradients flow back
only to the rank's own rows. They are divided by the rank's weight in the step, because the sum
across ranks multiplies them by this weight again. Each row's gradient is therefore summed exactly
once, as in a single process. A parameter that is used after the rows have been combined (a
temperature) has the full gradient on every rank. The weighted sum across ranks is therefore the
full gradient too. The backward pass does not communicate.

The method follows Chen et al., "A Simple Framework for Contrastive Learning of Visual
Representations", ICML 2020, section 2.2 (negatives over all devices).

Used by the training thread and, in a backward pass that recomputes a checkpointed block, by torch's
autograd thread.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from shoal_common.failpoints import failpoint
from torch.autograd.function import once_differentiable

from shoal_worker.elastic.contract.step import Step
from shoal_worker.elastic.session.session import Session
from shoal_worker.engine.step.ranks_in_passes import RanksInPasses
from shoal_worker.torch_internals import uncompiled


class WholeBatch:
    """Implements `shoal.whole_batch` for one session: combines the rows of all ranks' samples."""

    def __init__(self, session: Session, *, refusal: str | None) -> None:
        """`refusal`: why this run does not support `whole_batch`, and what to use instead; None if
        supported."""
        self._session: Session = weakref.proxy(session)  # this object lives as long as the session
        self._ranks = RanksInPasses(self._session, "the whole batch")
        self._refusal = refusal
        self._step: Callable[[], Step | None] = lambda: None
        """Weak reference to the last step in which rows were combined. In that step, this rank had
        `_rows` of the `_total` rows."""
        self._rows, self._total = 1, 1

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns `tensors` with the rows of all ranks, in rank order (`shoal.whole_batch`)."""
        rows = _rows(tensors)
        if self._refusal is not None:
            raise ConfigurationError(f"whole_batch: {self._refusal}")
        if self._ranks.in_micro_batches:
            raise ConfigurationError(
                "whole_batch: the steps are divided into micro-batches, and ranks have different "
                "numbers of them, so they cannot communicate in each of them. Leave out "
                "micro_batch_size= (in a Trainer, the accumulation of gradients); to save "
                "memory, compute the features under torch.utils.checkpoint"
            )
        weight = self._ranks.weight
        whole = (
            self._gathered(tensors, rows if weight > 0 else 0, weight)
            if weight is not None
            else None
        )
        return self._stand_in(tensors, rows) if whole is None else whole

    def _stand_in(self, tensors: Sequence[torch.Tensor], rows: int) -> list[torch.Tensor]:
        """Returns stand-in rows for a pass that cannot use rows of other ranks, because the step is
        aborted, or because the pass does not belong to a step with other ranks. Any values suffice
        there. If rows have already been combined in this step, returns the same number of rows as
        then, because the script uses both results together."""
        step = self._session.step
        if step is None or self._step() is not step:
            return list(tensors)
        places = torch.arange(self._total * rows // self._rows) % max(rows, 1)
        return [each[places.to(each.device)] for each in tensors]

    def _gathered(
        self, tensors: Sequence[torch.Tensor], rows: int, weight: float
    ) -> list[torch.Tensor] | None:
        """Returns the combined rows, or None if the step is lost. `rows`: number of this rank's
        rows that count; 0 for a stand-in batch."""
        header = torch.tensor([rows, _digest(tensors)], dtype=torch.int64)
        headers = self._ranks.gather(header, before=lambda: failpoint("whole_batch.before_headers"))
        if headers is None:
            return None
        counts = headers[:, 0].tolist()
        if headers[:, 1].unique().numel() > 1:
            raise PreconditionError(
                "whole_batch: the ranks passed different tensors; their number, their dtypes, "
                "and their shapes without the first dimension must be the same on all ranks. "
                "This rank passed "
                f"{', '.join(f'{each.dtype} {tuple(each.shape)}' for each in tensors)}",
                reason="RANKS_DIVERGED",
            )
        own = torch.cat([_bytes(each[:rows]) for each in tensors])
        longest = max(counts) * sum(_row_bytes(each) for each in tensors)
        padded = torch.cat([own, own.new_zeros(longest - own.numel())])
        gathered: torch.Tensor | None = padded.new_empty(1, 0)
        if longest:
            gathered = self._ranks.gather(
                padded, before=lambda: failpoint("whole_batch.before_rows")
            )
        if gathered is None:
            return None
        step = self._session.step
        if step is not None and self._step() is not step:
            self._step, self._rows, self._total = (
                weakref.ref(step),
                max(len(tensors[0]), 1),
                sum(counts),
            )
        before = sum(counts[: self._ranks.rank])
        found, begin = [], [0] * len(counts)
        for each in tensors:
            parts = []
            for number, count in enumerate(counts):
                end = begin[number] + count * _row_bytes(each)
                parts.append(
                    gathered[number, begin[number] : end]
                    .clone()
                    .view(each.dtype)
                    .view(count, *each.shape[1:])
                )
                begin[number] = end
            whole = torch.cat(parts) if longest else each[:0].detach()
            takes = each.requires_grad and torch.is_grad_enabled()
            found.append(_WithOwnRows.apply(each, whole, before, rows, weight) if takes else whole)  # type: ignore[no-untyped-call]
        return found


class _WithOwnRows(torch.autograd.Function):
    """Returns the combined rows. The backward pass returns the gradient of this rank's own rows."""

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, whole: torch.Tensor, before: int, rows: int, weight: float
    ) -> torch.Tensor:
        ctx.shape, ctx.place, ctx.weight = own.shape, (before, before + rows), weight
        return whole.view_as(whole)

    @staticmethod
    # a second derivative would lack the rows of other ranks
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        begin, end = ctx.place
        if begin == end:  # this batch is a stand-in
            return gradient.new_zeros(ctx.shape), None, None, None, None
        return gradient[begin:end] / ctx.weight, None, None, None, None


_known: weakref.WeakKeyDictionary[Session, WholeBatch] = weakref.WeakKeyDictionary()


def prepare(session: Session, refusal: str | None) -> None:
    """Enables `whole_batch` in a session that has a model. `refusal`: see `WholeBatch`."""
    _known[session] = WholeBatch(session, refusal=refusal)


@uncompiled
def whole_batch(session: Session, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns `tensors` with the rows of all ranks, in rank order (`shoal.whole_batch`).

    Raises:
        PreconditionError: `as_distributed` has not been called yet.
    """
    if session not in _known:
        raise PreconditionError(
            "whole_batch was called before as_distributed; call it in the loop, on outputs of "
            "the model"
        )
    return _known[session].of(tensors)


def _rows(tensors: Sequence[torch.Tensor]) -> int:
    """Returns the tensors' number of rows. Raises ConfigurationError unless all are plain tensors
    with the same number of rows."""
    for each in tensors:
        if (
            not isinstance(each, torch.Tensor)
            or each.layout is not torch.strided
            or each.dim() == 0
        ):
            kind = (
                f"{each.layout} {tuple(each.shape)}"
                if isinstance(each, torch.Tensor)
                else type(each).__name__
            )
            raise ConfigurationError(
                f"whole_batch of {kind}: expected dense tensors whose first dimension is this "
                "rank's samples"
            )
    rows = {len(each) for each in tensors}
    if len(rows) != 1:
        raise ConfigurationError(
            f"whole_batch of tensors with {sorted(rows)} rows: expected tensors with the same "
            "number of rows"
        )
    return rows.pop()


def _digest(tensors: Sequence[torch.Tensor]) -> int:
    """Returns a digest of the tensors' dtypes and shapes without the first dimension."""
    said = str([(str(each.dtype), tuple(each.shape[1:])) for each in tensors]).encode()
    return int.from_bytes(hashlib.sha256(said).digest()[:6], "big")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor[:0].element_size() * tensor.shape[1:].numel()
