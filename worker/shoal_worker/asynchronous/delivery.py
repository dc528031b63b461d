"""One iteration of a worker on its way to the servers, and its outcome: exchanged between
`ParameterServers` and its links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal_protos.v1 import coordinator_pb2 as coordinator_pb
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_worker.asynchronous.tensors import Iteration, Payload


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The outcome of a push."""

    staleness: int
    """Versions between the pull that the gradient was computed on and the push; the largest over
    the partitions."""
    known: bool
    """True if the whole push had already been applied for another member, which held the same
    batch."""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """One iteration on its way to the servers. Its progress is kept when partitions move halfway
    through. Each partition's entries belong to the thread that talks to its server."""

    iteration: Iteration
    payloads: dict[int, Callable[[], Payload]] = field(default_factory=dict)
    """Payload of each partition, the same for every attempt."""
    acknowledged: dict[int, pb.PartitionResult] = field(default_factory=dict)
    there: set[int] = field(default_factory=set)
    """Partitions that take this push for an earlier, abandoned push of the same batch."""
    pulled: set[int] = field(default_factory=set)
    """Partitions whose values for the next iteration have been pulled. With bsp, others may have
    advanced since."""

    def outcome(self) -> Pushed:
        """Returns the combined outcome of all partitions."""
        results = self.acknowledged.values()
        known = bool(results) and all(each.known_batch for each in results)
        return Pushed(staleness=max((each.staleness for each in results), default=0), known=known)


class ShardMapChanged(Exception):
    """Partitions have moved: this is the map now."""

    def __init__(self, shard_map: coordinator_pb.ShardMap) -> None:
        super().__init__(f"the shard map is at epoch {shard_map.epoch}")
        self.shard_map = shard_map
