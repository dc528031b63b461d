"""One partition: its values, version, optimizer and the sequence numbers applied to it. They change together or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from shoal_common.errors import PreconditionError

from shoal_ps_server.shard.layout import PartitionSpec
from shoal_ps_server.shard.optimizer import OptimizerSettings
from shoal_ps_server.shard.payload import UploadHeader, describe
from shoal_ps_server.shard.reading import Reading


@dataclass(frozen=True, kw_only=True)
class PartitionImage:
    """A partition at one moment, in tensors of its own: what a snapshot holds."""

    spec: PartitionSpec
    version: int
    """>= 1; partitions without values are not in snapshots."""
    values: torch.Tensor
    state: dict[str, torch.Tensor]
    """The optimizer's, by its names; empty before the first push."""
    sequences: dict[str, int]
    batches: dict[str, int]


@dataclass(kw_only=True)
class Partition:
    """Invariants: version 0 <=> no values; version = 1 + pushes applied; sequences[m] = the last of 1, 2, 3, ... settled for member m."""

    spec: PartitionSpec
    version: int = 0
    values: torch.Tensor | None = None
    sequences: dict[str, int] = field(default_factory=dict)
    batches: dict[str, int] = field(default_factory=dict)
    """Member -> key of the batch that its last push was computed on, if it had one. A member works on one batch at a time, so this is the
    only one that it may have pushed and not acknowledged when it dies; whoever gets the batch then pushes what is missing of it."""
    optimizer: torch.optim.Optimizer | None = None
    """Made at the first push."""
    readings: set[Reading] = field(default_factory=set)
    """Open ones: they must not see the next change."""

    @classmethod
    def restored(cls, image: PartitionImage, optimizer: OptimizerSettings | None) -> Partition:
        """Makes the partition that `image` was taken of. The image's tensors become the partition's own."""
        partition = cls(
            spec=image.spec, version=image.version, values=image.values, sequences=dict(image.sequences), batches=dict(image.batches)
        )
        if optimizer is not None and image.state:
            partition.optimizer = optimizer.build(image.values, tensor=image.spec.tensor)
            partition.optimizer.state[image.values] = dict(image.state)
        return partition

    def initialize(self, values: torch.Tensor) -> None:
        """The first values. Only at version 0."""
        self.values = values
        self.version = 1

    def is_duplicate(self, push: UploadHeader) -> bool:
        """True when this push was applied before, by this member or by one that had its batch; False when it is the member's next one.

        Raises PreconditionError: PARTITION_UNINITIALIZED, SEQUENCE_GAP, BASE_VERSION_AHEAD.
        """
        if self.version == 0:
            raise PreconditionError(
                f"{describe(self.spec)} has no values yet: send Initialize before Push", reason="PARTITION_UNINITIALIZED"
            )
        last = self.sequences.get(push.member_id, 0)
        if push.sequence <= last:
            return True
        if push.sequence > last + 1:
            raise PreconditionError(
                f"{describe(self.spec)}: sequence {push.sequence} of member {push.member_id!r} after {last}, expected {last + 1}; send "
                "what lies between, or, if this server was restored from a snapshot, go on from the sequences in GetServer",
                reason="SEQUENCE_GAP",
            )
        if push.base_version > self.version:
            raise PreconditionError(
                f"{describe(self.spec)}: the gradient was computed on version {push.base_version}, this server has {self.version}: it was "
                "restored from a snapshot; pull again",
                reason="BASE_VERSION_AHEAD",
            )
        return push.batch != 0 and push.batch in self.batches.values()

    def apply(self, gradient: torch.Tensor, push: UploadHeader, optimizer: OptimizerSettings) -> None:
        """One optimizer step with a sound gradient of the values' size and dtype, which is read and not kept."""
        values = self._values()
        for reading in self.readings:
            reading.detach()
        self.readings.clear()
        if self.optimizer is None:
            self.optimizer = optimizer.build(values, tensor=self.spec.tensor)
        values.grad = gradient
        try:
            self.optimizer.step()
        finally:
            values.grad = None
        self.settle(push)
        self.version += 1

    def settle(self, push: UploadHeader) -> None:
        """The push needs no further attention: it is applied, or was before. Its number is used up; an older one changes nothing."""
        if push.sequence <= self.sequences.get(push.member_id, 0):
            return
        self.sequences[push.member_id] = push.sequence
        if push.batch:
            self.batches[push.member_id] = push.batch
        else:
            self.batches.pop(push.member_id, None)

    def forget(self, member_id: str) -> None:
        """A member that will not come back."""
        self.sequences.pop(member_id, None)
        self.batches.pop(member_id, None)

    def read(self) -> Reading:
        """The values as they are now, to be read in pieces. Only with values; `readings.discard` it when done."""
        reading = Reading(self._values(), version=self.version)
        self.readings.add(reading)
        return reading

    def image(self) -> PartitionImage:
        """A copy. Only with values."""
        values = self._values()
        return PartitionImage(
            spec=self.spec,
            version=self.version,
            values=values.clone(),
            state={name: tensor.clone() for name, tensor in self._state().items()},
            sequences=dict(self.sequences),
            batches=dict(self.batches),
        )

    @property
    def stored_bytes(self) -> int:
        """Bytes of values and optimizer state."""
        if self.values is None:
            return 0
        return self.values.nbytes + sum(tensor.nbytes for tensor in self._state().values())

    def _values(self) -> torch.Tensor:
        assert self.values is not None, f"partition {self.spec.partition_id} has no values"
        return self.values

    def _state(self) -> dict[str, torch.Tensor]:
        if self.optimizer is None:
            return {}
        state = self.optimizer.state[self._values()]
        return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
