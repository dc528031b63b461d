"""How far one worker is with each partition: pushes that were acknowledged, versions that were
pulled, pushes in doubt.

There is one ledger for all servers, since partitions move between them: what stands here of a
partition stays true wherever it is. Each partition's entry belongs to the thread that speaks to the
server that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal_protos.v1 import parameter_server_pb2 as pb


@dataclass
class _Entry:
    """One partition."""

    acknowledged: int = 0
    """Sequence number of the last push that was acknowledged."""
    base: int = 0
    """Version that the next gradient is computed on; 0: never pulled."""
    held: int = 0
    """Version that need not be sent again; 0: whatever the server has is news."""
    doubt: int | None = None
    """A push was begun and not acknowledged: the key of its batch, or 0."""


class Ledger:
    """All partitions of the job, by number."""

    def __init__(self, partitions: Iterable[int]) -> None:
        self._entries = {partition_id: _Entry() for partition_id in partitions}

    def held(self, partition_id: int) -> int:
        """Version that need not be sent again; 0: whatever the server has is news."""
        return self._entries[partition_id].held

    def has_values(self, partition_id: int) -> bool:
        """This worker has pulled the partition before."""
        return self._entries[partition_id].base > 0

    def next_push(self, partition_id: int) -> tuple[int, int]:
        """The sequence number of the next push of a partition, and the version that its gradient is
        computed on."""
        entry = self._entries[partition_id]
        return entry.acknowledged + 1, entry.base

    def doubt(self, partition_id: int) -> int | None:
        """The batch of a push that was begun and not acknowledged: nobody knows what became of it.
        0: it had none; None: there is no such push."""
        return self._entries[partition_id].doubt

    def begun(self, partitions: Iterable[int], batch: int) -> None:
        """The next push of each of these partitions begins; it has the gradients of this batch."""
        for partition_id in partitions:
            self._entries[partition_id].doubt = batch

    def acknowledged(self, results: Iterable[pb.PartitionResult]) -> None:
        """The next push of each of these partitions was acknowledged."""
        for result in results:
            entry = self._entries[result.partition_id]
            entry.acknowledged += 1
            entry.doubt = None

    def computed_on(self, versions: Mapping[int, int]) -> None:
        """The next gradients of these partitions are of these versions."""
        for partition_id, version in versions.items():
            self._entries[partition_id].base = version

    def pulled(self, headers: Iterable[pb.PullHeader]) -> None:
        """This worker has these versions now."""
        for header in headers:
            entry = self._entries[header.partition_id]
            entry.base = entry.held = header.version

    def ahead(self, state: Iterable[pb.PartitionVersion]) -> frozenset[int]:
        """The partitions of which the server has more pushes of this worker's than it has
        acknowledged."""
        return frozenset(
            here.partition_id
            for here in state
            if here.sequence > self._entries[here.partition_id].acknowledged
        )

    def follow(self, state: Iterable[pb.PartitionVersion]) -> None:
        """Goes on behind what the server has of this worker's pushes, acknowledged or not."""
        for here in state:
            entry = self._entries[here.partition_id]
            entry.acknowledged = here.sequence
            entry.base = min(entry.base, here.version or entry.base)
            entry.doubt = None

    def rewind(self, state: Iterable[pb.PartitionVersion]) -> int:
        """Goes on from where the server stands. Returns how many pushes it had acknowledged and has
        lost, counted by partition.

        One more than it has acknowledged is no loss: the push in progress was applied, and sending
        it again will only be acknowledged.
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
