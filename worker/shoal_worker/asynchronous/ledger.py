"""How far one worker is with each partition of one server: pushes that were acknowledged, and versions that were pulled.

Belongs to the thread that speaks to the server: see `ServerLink`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal_protos.v1 import parameter_server_pb2 as pb


class Ledger:
    """One server's partitions, by number."""

    def __init__(self, partitions: Iterable[int]) -> None:
        self._acknowledged = dict.fromkeys(partitions, 0)
        """Partition -> sequence number of the last push that the server has acknowledged."""
        self._base = dict.fromkeys(self._acknowledged, 0)
        """Partition -> version that the next gradient is computed on; 0: never pulled."""
        self._held = dict.fromkeys(self._acknowledged, 0)
        """Partition -> version that need not be sent again; 0: whatever the server has is news."""

    @property
    def held(self) -> Mapping[int, int]:
        """Partition -> version that need not be sent again; 0: whatever the server has is news."""
        return self._held

    def next_push(self, partition_id: int) -> tuple[int, int]:
        """The sequence number of the next push of a partition, and the version that its gradient is computed on."""
        return self._acknowledged[partition_id] + 1, self._base[partition_id]

    def acknowledged(self, results: Iterable[pb.PartitionResult]) -> None:
        """The server has acknowledged the next push of each of these partitions."""
        for result in results:
            self._acknowledged[result.partition_id] += 1

    def computed_on(self, versions: Mapping[int, int]) -> None:
        """The next gradients of these partitions are of these versions."""
        self._base.update(versions)

    def pulled(self, headers: Iterable[pb.PullHeader]) -> None:
        """This worker has these versions now."""
        for header in headers:
            self._base[header.partition_id] = self._held[header.partition_id] = header.version

    def ahead(self, state: Iterable[pb.PartitionVersion]) -> frozenset[int]:
        """The partitions of which the server has more pushes of this worker's than it has acknowledged."""
        return frozenset(here.partition_id for here in state if here.sequence > self._acknowledged[here.partition_id])

    def follow(self, state: Iterable[pb.PartitionVersion]) -> None:
        """Goes on behind what the server has of this worker's pushes, acknowledged or not."""
        for here in state:
            self._acknowledged[here.partition_id] = here.sequence
            self._base[here.partition_id] = min(self._base[here.partition_id], here.version)

    def rewind(self, state: Iterable[pb.PartitionVersion]) -> int:
        """Goes on from where the server stands. Returns how many pushes it had acknowledged and has lost, counted by partition.

        One more than it has acknowledged is no loss: the push in progress was applied, and sending it again will only be acknowledged.
        """
        lost = 0
        for here in state:
            number = here.partition_id
            missing = max(0, self._acknowledged[number] - here.sequence)
            self._acknowledged[number] -= missing
            if missing or here.version < self._held[number]:
                self._held[number] = 0
            self._base[number] = min(self._base[number], here.version)
            lost += missing
        return lost
