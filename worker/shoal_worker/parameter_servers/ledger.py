"""One worker's progress with each partition: acknowledged pushes, pulled versions, and pushes with
unknown outcome. Also defines two types that `ParameterServers` and its links share: the iteration
being sent (`Delivery`) and its outcome (`Pushed`).

All servers share one ledger, because partitions move between servers: an entry remains valid
whichever server has its partition. Each partition's entry belongs to the thread that calls the
partition's server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from shoal_protos.v1 import coordinator_pb2 as coordinator_pb
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_worker.parameter_servers.tensors import Iteration, Payload


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """Outcome of a push, combined over all partitions."""

    staleness: int
    """Number of versions between the values that the gradient was computed on and the values that
    it was applied to; the maximum over all partitions.
    """
    known: bool
    """True if the entire push had already been applied, because a different member had pushed the
    same batch."""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """One iteration that is being sent to the servers. If partitions move to other servers before
    everything is sent, what has been sent so far remains recorded here. Each partition's entries
    belong to the thread that calls the partition's server."""

    iteration: Iteration
    payloads: dict[int, Callable[[], Payload]] = field(default_factory=dict)
    """Payload of each partition; the same in every attempt."""
    acknowledged: dict[int, pb.PartitionResult] = field(default_factory=dict)
    there: set[int] = field(default_factory=set)
    """Partitions to which an earlier, abandoned push of the same batch has already been applied.
    Their servers acknowledge this push without applying it."""
    pulled: set[int] = field(default_factory=set)
    """Partitions whose values for the next iteration have been pulled. They are not pulled again,
    because under bsp their servers may have moved on to a later iteration."""

    def outcome(self) -> Pushed:
        """Combines the outcomes on all partitions into one."""
        results = self.acknowledged.values()
        known = bool(results) and all(each.known_batch for each in results)
        return Pushed(staleness=max((each.staleness for each in results), default=0), known=known)


class ShardMapChanged(Exception):
    """Raised when partitions have moved between servers. Contains the new shard map."""

    def __init__(self, shard_map: coordinator_pb.ShardMap) -> None:
        super().__init__(f"partitions have moved; the shard map is at epoch {shard_map.epoch}")
        self.shard_map = shard_map


@dataclass
class _Entry:
    """This worker's progress with one partition."""

    acknowledged: int = 0
    """Sequence number of the last acknowledged push."""
    base: int = 0
    """Version of the values used to compute the next gradient; 0 if the partition has never been
    pulled."""
    held: int = 0
    """Version that this worker has, so the server need not send it again; 0 if it has none."""
    doubt: int | None = None
    """Batch key (or 0) of a push that was started but not acknowledged; None if there is none."""


class Ledger:
    """This worker's progress with all partitions of the job, by partition number."""

    def __init__(self, partitions: Iterable[int]) -> None:
        self._entries = {partition_id: _Entry() for partition_id in partitions}

    def held(self, partition_id: int) -> int:
        """Returns the version of the partition that this worker has, so the server need not send it
        again; 0 if it has none."""
        return self._entries[partition_id].held

    def has_values(self, partition_id: int) -> bool:
        """Returns whether this worker has pulled the partition before."""
        return self._entries[partition_id].base > 0

    def next_push(self, partition_id: int) -> tuple[int, int]:
        """Returns the sequence number of a partition's next push, and the version of the values
        used to compute its gradient."""
        entry = self._entries[partition_id]
        return entry.acknowledged + 1, entry.base

    def doubt(self, partition_id: int) -> int | None:
        """Returns the batch key of a partition's push whose outcome is unknown, because it was
        started but not acknowledged. Returns 0 if that push had no batch, and None if there is no
        such push."""
        return self._entries[partition_id].doubt

    def begun(self, partitions: Iterable[int], batch: int) -> None:
        """Records that the next push of these partitions is starting. `batch`: key of its batch, or
        0."""
        for partition_id in partitions:
            self._entries[partition_id].doubt = batch

    def acknowledged(self, results: Iterable[pb.PartitionResult]) -> None:
        """Records, for each of these partitions, that its most recently started push has been
        acknowledged."""
        for result in results:
            entry = self._entries[result.partition_id]
            entry.acknowledged += 1
            entry.doubt = None

    def computed_on(self, versions: Mapping[int, int]) -> None:
        """Records the versions of the values used to compute the next gradients. `versions`:
        partition id -> version."""
        for partition_id, version in versions.items():
            self._entries[partition_id].base = version

    def pulled(self, headers: Iterable[pb.PullHeader]) -> None:
        """Records the versions that this worker has pulled."""
        for header in headers:
            entry = self._entries[header.partition_id]
            entry.base = entry.held = header.version

    def ahead(self, state: Iterable[pb.PartitionVersion]) -> frozenset[int]:
        """Returns the partitions to which the server has applied more of this worker's pushes than
        this worker has seen acknowledged."""
        return frozenset(
            here.partition_id
            for here in state
            if here.sequence > self._entries[here.partition_id].acknowledged
        )

    def follow(self, state: Iterable[pb.PartitionVersion]) -> None:
        """Adjusts the sequence numbers to continue after all of this worker's pushes that the
        server has applied, whether or not they were acknowledged."""
        for here in state:
            entry = self._entries[here.partition_id]
            entry.acknowledged = here.sequence
            entry.base = min(entry.base, here.version or entry.base)
            entry.doubt = None

    def rewind(self, state: Iterable[pb.PartitionVersion]) -> int:
        """Adjusts the sequence numbers to continue from the server's state. Returns the number of
        acknowledged pushes that the server has lost, counting each partition separately.

        If the server has one push more than it has acknowledged, nothing is lost: it has applied
        the push in progress, and will merely acknowledge it when it is sent again.
        """
        lost = 0
        for here in state:
            entry = self._entries[here.partition_id]
            missing = max(0, entry.acknowledged - here.sequence)
            entry.acknowledged -= missing
            if missing or here.version < entry.held:
                entry.held = 0
            entry.base = min(entry.base, here.version or entry.base)
            lost += missing
        return lost
