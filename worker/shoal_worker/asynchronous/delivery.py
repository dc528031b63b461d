"""One iteration of a worker on its way to the servers, and what became of it: what
`ParameterServers` and its links pass to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal_protos.v1 import coordinator_pb2 as coordinator_pb
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_worker.asynchronous.tensors import Iteration, Payload


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What became of a push."""

    staleness: int
    """Versions between the pull that the gradient was computed on and the push; the largest over
    the partitions."""
    known: bool
    """Something was pushed, and all of it had come from another member before, which had the
    batch."""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """One iteration on its way to the servers; what has become of it stays known when partitions
    move in the middle. Each partition's entries belong to the thread that speaks to its server."""

    iteration: Iteration
    payloads: dict[int, Callable[[], Payload]] = field(default_factory=dict)
    """Partition -> what is pushed to it, however often that is attempted."""
    acknowledged: dict[int, pb.PartitionResult] = field(default_factory=dict)
    there: set[int] = field(default_factory=set)
    """Partitions that take their push for an earlier one of the same batch, which was given up."""
    pulled: set[int] = field(default_factory=set)
    """Partitions of which this worker has the values that its next iteration begins with. With bsp
    others may have gone on since."""

    def outcome(self) -> Pushed:
        """What became of all of it."""
        results = self.acknowledged.values()
        known = bool(results) and all(each.known_batch for each in results)
        return Pushed(staleness=max((each.staleness for each in results), default=0), known=known)


class ShardMapChanged(Exception):
    """Partitions have moved: this is the map now."""

    def __init__(self, shard_map: coordinator_pb.ShardMap) -> None:
        super().__init__(f"the shard map is at epoch {shard_map.epoch}")
        self.shard_map = shard_map
