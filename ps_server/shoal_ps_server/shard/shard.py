"""A server's shard: every partition it holds, and the only ways to change one.

The shard belongs to the event loop's thread: no method locks, waits, or may be called from elsewhere (docs/decisions/0031 has the
measurement). gRPC's own threads take the next chunks off the wire while torch, which releases the GIL, applies a partition. A write-ahead
journal and a backup will stand between the check of a push and `Partition.apply`, in `push`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from shoal_common.errors import PreconditionError

from shoal_ps_server.shard.layout import Layout
from shoal_ps_server.shard.optimizer import OptimizerSettings
from shoal_ps_server.shard.partition import Partition, PartitionImage
from shoal_ps_server.shard.payload import Upload
from shoal_ps_server.shard.reading import Reading


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one uploaded partition."""

    partition_id: int
    version: int
    """After it."""
    staleness: int = 0
    """Versions between the one the gradient was computed on and the one it was applied to."""
    duplicate: bool = False
    """Known before; nothing changed."""
    apply_seconds: float = 0.0
    """Spent in arithmetic and last checks."""


@dataclass(frozen=True, kw_only=True)
class ShardSummary:
    """What GetServer and the metrics tell."""

    versions: Mapping[int, int]
    """Partition id -> version, ascending; 0: no values yet."""
    sequences: Mapping[int, int]
    """Partition id -> last applied sequence of the member asked about; only those above 0."""
    stored_bytes: int
    pushes_applied: int
    pushes_deduplicated: int


class Shard:
    """All partitions of one server. `restored`: what a snapshot held."""

    def __init__(self, *, optimizer: OptimizerSettings | None = None, restored: Iterable[PartitionImage] = ()) -> None:
        self._optimizer = optimizer
        self._partitions = {image.spec.partition_id: Partition.restored(image, optimizer) for image in restored}
        self._pushes_applied = 0
        self._pushes_deduplicated = 0

    def adopt(self, layout: Layout) -> None:
        """Makes room for the partitions of a layout; those that are here stay as they are."""
        for partition_id, spec in layout.partitions.items():
            self._partitions.setdefault(partition_id, Partition(spec=spec))

    def configure(self, optimizer: OptimizerSettings) -> None:
        """Sets the optimizer, or changes the hyperparameters of the one that is set."""
        self._optimizer = optimizer
        for partition in self._partitions.values():
            if partition.optimizer is not None:
                optimizer.retune(partition.optimizer, tensor=partition.spec.tensor)

    def initialize(self, upload: Upload) -> Outcome:
        """Gives a partition its first values; a duplicate if it has some. Raises as `Upload.values`."""
        started = time.perf_counter()
        spec = upload.header.spec
        partition = self._partitions[spec.partition_id]
        duplicate = partition.version > 0
        if not duplicate:
            partition.initialize(upload.values())
        return Outcome(
            partition_id=spec.partition_id,
            version=partition.version,
            duplicate=duplicate,
            apply_seconds=time.perf_counter() - started,
        )

    def push(self, upload: Upload) -> Outcome:
        """Applies one gradient, once.

        Raises PreconditionError (OPTIMIZER_UNCONFIGURED, and as `Partition.is_duplicate`) and as `Upload.values`; nothing changed then.
        """
        started = time.perf_counter()
        header = upload.header
        partition = self._partitions[header.spec.partition_id]
        if self._optimizer is None:
            raise PreconditionError("this server has no optimizer: send ConfigureOptimizer before Push", reason="OPTIMIZER_UNCONFIGURED")
        if partition.is_duplicate(header):
            partition.settle(header)
            self._pushes_deduplicated += 1
            return Outcome(partition_id=header.spec.partition_id, version=partition.version, duplicate=True)
        gradient = upload.values()
        staleness = partition.version - header.base_version
        partition.apply(gradient, header, self._optimizer)
        self._pushes_applied += 1
        return Outcome(
            partition_id=header.spec.partition_id,
            version=partition.version,
            staleness=staleness,
            apply_seconds=time.perf_counter() - started,
        )

    def version(self, partition_id: int) -> int:
        """A partition's version; 0: no values yet."""
        return self._partitions[partition_id].version

    @contextmanager
    def reading(self, partition_id: int) -> Iterator[Reading]:
        """A partition's values as they are now, to be read in pieces. Only with values."""
        partition = self._partitions[partition_id]
        reading = partition.read()
        try:
            yield reading
        finally:
            partition.readings.discard(reading)

    def image(self, partition_id: int) -> PartitionImage | None:
        """A copy of a partition for a snapshot; None without values."""
        partition = self._partitions[partition_id]
        return partition.image() if partition.version else None

    def partition_ids(self) -> tuple[int, ...]:
        """Those held, ascending, with values or without."""
        return tuple(sorted(self._partitions))

    def forget(self, member_ids: Iterable[str]) -> None:
        """Drops what is known of members that will not come back."""
        for partition in self._partitions.values():
            for member_id in member_ids:
                partition.forget(member_id)

    def summary(self, member_id: str = "") -> ShardSummary:
        """Totals and versions, and the sequences of one member."""
        held = [self._partitions[partition_id] for partition_id in self.partition_ids()]
        return ShardSummary(
            versions={each.spec.partition_id: each.version for each in held},
            sequences={each.spec.partition_id: each.sequences[member_id] for each in held if member_id in each.sequences},
            stored_bytes=sum(each.stored_bytes for each in held),
            pushes_applied=self._pushes_applied,
            pushes_deduplicated=self._pushes_deduplicated,
        )
