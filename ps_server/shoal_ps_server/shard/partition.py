"""One partition: its values, version, optimizer, and the sequence numbers of applied pushes, which
all change atomically."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final
from weakref import WeakValueDictionary

import torch
from shoal_common.errors import InvalidRequestError, LimitError, PreconditionError
from shoal_common.formats import codecs
from shoal_common.tables.rows import RowsImage

from shoal_ps_server.shard.compensation import BaseValues, compensated
from shoal_ps_server.shard.encoding import encode_values
from shoal_ps_server.shard.layout import PartitionSpec
from shoal_ps_server.shard.optimizer import OptimizerSettings
from shoal_ps_server.shard.payload import UploadHeader, describe, largest_of
from shoal_ps_server.shard.reading import Copies, EncodedValues, Reading
from shoal_ps_server.shard.run_optimizer import PartitionOptimizer, RunImage

_CALM: Final = {torch.float32: 1e16, torch.bfloat16: 1e16, torch.float64: 1e150}
"""Dtype -> magnitude whose square, as computed by Adam, is far below the largest number of the
type. float16 has no such magnitude."""

_CALM_MARGIN: Final = 1e8
"""Safety margin for optimizers that scale an update by the norm of the values divided by the norm
of the update: values must be smaller than _CALM by this factor."""

MOST_LEFT: Final = 1024
"""Maximum number of remembered batches that members have abandoned."""


@dataclass(frozen=True, kw_only=True)
class PartitionImage:
    """Copy of a partition at one moment, as stored in a snapshot."""

    spec: PartitionSpec
    version: int
    """Version of the partition, at least 1: partitions without values are not in snapshots."""
    values: torch.Tensor
    runs: tuple[RunImage, ...]
    """State of the optimizer; empty before the first push."""
    sequences: dict[str, int]
    batches: dict[str, int]
    left: list[int]
    """Keys of batches that were pushed to this partition and then abandoned by their members, as in
    `Settled.left`."""
    pulled: Mapping[str, int] = field(default_factory=dict)
    """Member -> last version that it pulled, for delay compensation. `base_values` contains the
    values of earlier versions."""
    base_values: Mapping[int, torch.Tensor] = field(default_factory=dict)
    rows: RowsImage | None = None
    """Rows of a bucket of a sparse table, which has neither `values` nor `runs`; None for other
    partitions."""
    restoration: int = 0
    """Number of the last restoration, as in `Partition.restoration`."""

    def settled(self) -> Settled:
        """Returns a copy of the record of settled pushes."""
        return Settled(
            sequences=dict(self.sequences), batches=dict(self.batches), left=list(self.left)
        )

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the state tensors of the optimizer by name: "RUN:NAME"."""
        return {
            f"{place}:{name}": run.state[name]
            for place, run in enumerate(self.runs)
            for name in sorted(run.state)
        }

    def copy(self) -> PartitionImage:
        """Returns a copy whose tensors are independent of this image."""
        runs = tuple(
            replace(run, state={name: tensor.clone() for name, tensor in run.state.items()})
            for run in self.runs
        )
        base_values = {version: tensor.clone() for version, tensor in self.base_values.items()}
        return replace(self, values=self.values.clone(), runs=runs, base_values=base_values)


@dataclass(kw_only=True)
class Settled:
    """Record of the pushes that have been settled: each has been applied, or did not have to be,
    because its batch had already been pushed."""

    sequences: dict[str, int] = field(default_factory=dict)
    """Member -> last sequence number. Each member numbers its pushes 1, 2, 3, ..."""
    batches: dict[str, int] = field(default_factory=dict)
    """Member -> key of the batch of its last push, if the push had one. A member works on one batch
    at a time, so when it dies, only this batch may have been pushed to some partitions but not to
    others; the next member that gets the batch then pushes it to the remaining partitions."""
    left: list[int] = field(default_factory=list)
    """Keys of batches that were pushed to this partition and then abandoned by their members for a
    different batch. Other partitions may lack these pushes."""

    def settle(self, push: UploadHeader, finished: Container[int]) -> None:
        """Records that the sequence number of a push is used. Has no effect if the number is not
        above the last one. `finished`: batches that have been pushed to all partitions."""
        if push.sequence <= self.sequences.get(push.member_id, 0):
            return
        self.sequences[push.member_id] = push.sequence
        before = self.batches.get(push.member_id)
        if before is not None and before != push.batch and before not in finished:
            self.left = [*(key for key in self.left if key not in finished), before][-MOST_LEFT:]
        if push.batch:
            self.batches[push.member_id] = push.batch
        else:
            self.batches.pop(push.member_id, None)

    def has(self, batch: int, *, but_of: str = "") -> bool:
        """Returns whether a member other than `but_of` has pushed the batch, or any member has
        pushed and then abandoned it."""
        return batch != 0 and (
            batch in self.left
            or any(key == batch for member, key in self.batches.items() if member != but_of)
        )

    def forget(self, member_id: str) -> None:
        """Forgets a member that will not return."""
        self.sequences.pop(member_id, None)
        self.batches.pop(member_id, None)

    def copy(self) -> Settled:
        """Returns an independent copy of the settled pushes."""
        return Settled(
            sequences=dict(self.sequences), batches=dict(self.batches), left=list(self.left)
        )


@dataclass(kw_only=True)
class Partition:
    """A partition of a server. Invariants: version 0 means no values; otherwise the version is 1 +
    the number of pushes applied. Pushes are admitted first. Then they are applied in the same
    order. If one is refused, all later ones are refused too."""

    spec: PartitionSpec
    version: int = 0
    values: torch.Tensor | None = None
    settled: Settled = field(default_factory=Settled)
    largest_at_first: float = 0.0
    """Largest magnitude among the initial values. Updates for which `OptimizerSettings.is_calm` is
    True cannot make values grow from there to an overflow."""
    optimizer: PartitionOptimizer | None = None
    """Optimizer of the partition; None until the first push."""
    bases: BaseValues = field(default_factory=BaseValues)
    """Earlier values for delay compensation; empty without it."""
    readings: set[Reading] = field(default_factory=set)
    """Open readings of the live values. They must not see the next change."""
    encoded: WeakValueDictionary[int, EncodedValues] = field(default_factory=WeakValueDictionary)
    """Codec -> the current values encoded with it, kept as long as a reader uses them."""
    ahead: Settled | None = None
    """`settled` as it will be once all admitted pushes are applied; None if no pushes are
    pending."""
    on_their_way: int = 0
    """Number of admitted pushes that have been neither applied nor refused yet; `to_apply`: how
    many of these will change the values."""
    to_apply: int = 0
    restoration: int = 0
    """Number of the last restoration of a bucket of a table, which also set its version; 0 if there
    was none."""
    is_restoring: bool = False
    """True if a restoration has been admitted and has been neither carried out nor refused yet."""
    _is_calm: tuple[OptimizerSettings, bool] | None = None
    """Cached result of `OptimizerSettings.is_calm` for these settings and the tensors of this
    partition."""

    @classmethod
    def restored(cls, image: PartitionImage, optimizer: OptimizerSettings | None) -> Partition:
        """Restores a partition from `image`, whose tensors become the partition's own."""
        partition = cls(
            spec=image.spec,
            version=image.version,
            values=image.values,
            settled=image.settled(),
            largest_at_first=largest_of(image.values),
            bases=BaseValues(pulled=image.pulled, copies=image.base_values),
        )
        if optimizer is not None and image.runs:
            partition.optimizer = PartitionOptimizer(
                image.values, image.spec, optimizer, image.runs
            )
        return partition

    def initialize(self, values: torch.Tensor) -> None:
        """Sets the initial values. May be called only at version 0."""
        self.values = values
        self.largest_at_first = largest_of(values)
        self.version = 1

    def is_duplicate(self, push: UploadHeader) -> bool:
        """Returns whether a push must not be applied, because its member has already sent it, or
        because its batch has already been pushed to this partition. Pending pushes count as well.
        If the result is False, the push has the member's next sequence number.

        Raises PreconditionError: PARTITION_UNINITIALIZED, SEQUENCE_GAP, BASE_VERSION_AHEAD.
        """
        if self.version == 0:
            raise PreconditionError(
                f"{describe(self.spec)} has no values yet; send Initialize before Push",
                reason="PARTITION_UNINITIALIZED",
            )
        known = self.ahead or self.settled
        last = known.sequences.get(push.member_id, 0)
        if push.sequence <= last:
            return True
        if push.sequence > last + 1:
            raise PreconditionError(
                f"{describe(self.spec)}: received sequence {push.sequence} of member "
                f"{push.member_id!r} after {last}; expected {last + 1}. Send the missing "
                "pushes or, if this server was restored from a snapshot, continue from the "
                "sequence numbers that GetServer returns",
                reason="SEQUENCE_GAP",
            )
        if push.base_version > self.version:
            raise PreconditionError(
                f"{describe(self.spec)}: the gradient was computed on version "
                f"{push.base_version}, but this server has {self.version}, since it was restored "
                "from a snapshot; pull again",
                reason="BASE_VERSION_AHEAD",
            )
        return known.has(push.batch)

    def has_of_another(self, push: UploadHeader) -> bool:
        """Returns whether the batch of a push has already been pushed to this partition, by a
        different member or by the same member before it abandoned the batch."""
        return self.settled.has(push.batch, but_of=push.member_id)

    def last_sequence(self, member_id: str) -> int:
        """Returns the sequence number of a member's last push that was applied or is pending; 0 if
        there is none."""
        return (self.ahead or self.settled).sequences.get(member_id, 0)

    def is_next(self, push: UploadHeader) -> bool:
        """Returns whether a push has the member's next sequence number. The number must be marked
        as used even if a different push has already delivered the batch."""
        return push.sequence > (self.ahead or self.settled).sequences.get(push.member_id, 0)

    def admit(self, push: UploadHeader, finished: Container[int], *, applies: bool) -> int:
        """Registers a push as pending, and returns the version that the partition will have after
        it. `applies`: True if the push changes the values."""
        if self.ahead is None:
            self.ahead = self.settled.copy()
        self.ahead.settle(push, finished)
        self.on_their_way += 1
        self.to_apply += applies
        return self.version + self.to_apply

    def arrived(
        self, push: UploadHeader, finished: Container[int], *, applies: bool, refused: bool = False
    ) -> None:
        """Stops counting `push`, the earliest pending push, as pending, because it has been applied
        or refused. `applies`: as in `admit`."""
        if not refused:
            self.settled.settle(push, finished)
        self.on_their_way -= 1
        self.to_apply -= applies
        if not self.on_their_way:
            self.ahead = None

    def apply(
        self,
        gradient: torch.Tensor,
        absent: Collection[int],
        optimizer: OptimizerSettings,
        copies: Copies,
        base: int = 0,
    ) -> None:
        """Performs one optimizer step.

        Args:
            gradient: valid gradient of the values' dtype, without the pieces at the positions
                `absent`. It is not kept.
            absent: positions of pieces without a gradient.
            optimizer: settings of the optimizer.
            copies: makes a copy of the old values, in which open readings continue.
            base: version whose values compensate the gradient, registered with `bases`; 0: no
                compensation.
        """
        values = self._values()
        gradient = self._compensated(gradient, absent, optimizer, base)
        if base:
            self.bases.settle(base)
        self.bases.before_change(self.version, values)
        copies.detach(values, self.readings)
        self.readings.clear()
        self.encoded.clear()
        if self.optimizer is None:
            self.optimizer = PartitionOptimizer(values, self.spec, optimizer)
        self.optimizer.step(gradient, absent)
        self.version += 1

    def needs_trial(self, largest: float, optimizer: OptimizerSettings) -> bool:
        """Returns whether an update may produce infinite values, and must therefore first be tried
        on copies (`check_trial`). `largest`: largest magnitude in the gradient."""
        limit = _CALM.get(self.spec.element.torch, 0.0)
        if not limit or not max(largest, self.largest_at_first) <= limit:
            return True
        if self._is_calm is None or self._is_calm[0] is not optimizer:
            self._is_calm = (
                optimizer,
                optimizer.is_calm({optimizer.place_of(piece.tensor) for piece in self.spec.pieces}),
            )
        return not self._is_calm[1] or (
            optimizer.most_growth > 1
            and self._may_outgrow(limit / _CALM_MARGIN, optimizer.most_growth)
        )

    def _may_outgrow(self, limit: float, growth: float) -> bool:
        """Returns whether values may exceed `limit` after all pending updates and one more. Each
        update multiplies the norm of the values by at most `growth`. Their largest magnitude counts
        as at least 1, because an update may change values that are zero by about 1."""
        norm = max(1.0, largest_of(self._values())) * math.sqrt(self.spec.length)
        return math.log(norm) + (self.to_apply + 1) * math.log(growth) > math.log(limit)

    def check_trial(
        self,
        gradient: torch.Tensor,
        absent: Collection[int],
        optimizer: OptimizerSettings,
        base: int = 0,
    ) -> None:
        """Performs an update on copies, to verify that its result is finite. Must not be called
        while a push is pending. `base`: as in `apply`.

        Raises InvalidRequestError / RESULT_NOT_FINITE if values or optimizer state become infinite
        or NaN.
        """
        trial = Partition.restored(self.as_it_is().copy(), optimizer)
        gradient = self._compensated(gradient, absent, optimizer, base)
        trial.apply(gradient, absent, optimizer, Copies())
        for name, begin, each, tensor in (("values", 0, 1, trial._values()), *trial._state()):
            culprits = torch.isfinite(tensor).logical_not_()
            if count := int(culprits.sum()):
                first = self.spec.name_of(begin + each * int(culprits.to(torch.uint8).argmax()))
                raise InvalidRequestError(
                    f"{describe(self.spec)}: the update would make {count} of {tensor.numel()} "
                    f"{name} NaN or infinite, the first at {first}. The partition is unchanged, "
                    "and its sequence number can be reused. Clip the gradients, or lower the "
                    "learning rate",
                    reason="RESULT_NOT_FINITE",
                )

    def reserve(
        self, gradient: torch.Tensor, absent: Collection[int], optimizer: OptimizerSettings
    ) -> None:
        """Checks that there is enough memory for optimizer state that the push creates (if it is a
        piece's first push), and for a copy of the values if delay compensation may need one.
        Allocates this memory and frees it again.

        Raises LimitError / MEMORY_EXHAUSTED.
        """
        pieces = self.spec.pieces if self.optimizer is None else self.optimizer.fresh_pieces(absent)
        nbytes = optimizer.most_state_bytes(pieces, self.spec.element)
        if optimizer.delay_compensation:
            nbytes += self.spec.nbytes
        if not nbytes:
            return
        try:
            torch.empty(nbytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise LimitError(
                f"{describe(self.spec)}: not enough memory for {nbytes} bytes of optimizer state; "
                "the partition is unchanged. Give the server more memory, or the job more servers",
                reason="MEMORY_EXHAUSTED",
            ) from error

    def forget(self, member_id: str) -> None:
        """Forgets a member that will not return."""
        self.settled.forget(member_id)
        if self.ahead is not None:
            self.ahead.forget(member_id)

    def read(self, codec: int, copies: Copies) -> Reading:
        """Returns a reading of the current values, which can be read piece by piece. The partition
        must have values. Call `readings.discard` when done. Raises the errors of `encode_values`.

        `codec`: encoding of the values.
        """
        if codec != codecs.RAW:
            encoded = self.encoded.get(codec)
            if encoded is None:
                self.encoded[codec] = encoded = EncodedValues(encode_values(self._values(), codec))
            return encoded.read(copies, version=self.version)
        reading = Reading(self._values(), version=self.version)
        self.readings.add(reading)
        return reading

    def image(self) -> PartitionImage:
        """Returns a copy of the partition, which must have values."""
        return replace(
            self.as_it_is(), pulled=dict(self.bases.pulled), base_values=dict(self.bases.copies)
        ).copy()

    def as_it_is(self) -> PartitionImage:
        """Returns an image that shares the partition's tensors, so that later changes of the
        partition are visible in it. Omits the copies for delay compensation. The partition must
        have values."""
        return PartitionImage(
            spec=self.spec,
            version=self.version,
            values=self._values(),
            runs=() if self.optimizer is None else self.optimizer.images(),
            sequences=dict(self.settled.sequences),
            batches=dict(self.settled.batches),
            left=list(self.settled.left),
        )

    @property
    def stored_rows(self) -> int:
        """Number of rows if the partition is a bucket of a sparse table; otherwise 0."""
        return 0

    @property
    def stored_bytes(self) -> int:
        """Total size in bytes of values, optimizer state, and copies for delay compensation."""
        if self.values is None:
            return 0
        copies = sum(copy.nbytes for copy in self.bases.copies.values())
        return self.values.nbytes + copies + sum(tensor.nbytes for _, _, _, tensor in self._state())

    def _values(self) -> torch.Tensor:
        assert self.values is not None, f"partition {self.spec.partition_id} has no values"
        return self.values

    def _compensated(
        self,
        gradient: torch.Tensor,
        absent: Collection[int],
        optimizer: OptimizerSettings,
        base: int,
    ) -> torch.Tensor:
        if base in (0, self.version):
            return gradient
        now, then = (
            self.spec.without(values, absent)
            for values in (self._values(), self.bases.copies[base])
        )
        limit = _CALM.get(gradient.dtype, torch.finfo(gradient.dtype).max)
        return compensated(
            gradient, now=now, then=then, strength=optimizer.delay_compensation, limit=limit
        )

    def _state(self) -> Iterator[tuple[str, int, int, torch.Tensor]]:
        return iter(()) if self.optimizer is None else self.optimizer.state()
