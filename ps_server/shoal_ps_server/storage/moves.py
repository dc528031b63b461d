"""Partitions that are moving between this server and another server, as recorded in the journal
(docs/explanation/parameter-servers.md#moving-partitions).

Leaving partitions stay on this server, frozen, and received partitions are not served, until the
coordinator's shard map determines their owner. A running server, a recovering server and a backup
all reach the same state through the methods below, one for each kind of record. Belongs to the
event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from shoal_common.errors import PreconditionError

from shoal_ps_server.shard.layout import Layout
from shoal_ps_server.shard.partition import PartitionImage
from shoal_ps_server.shard.shard import Shard


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """Partitions of this server that another server has received, or may have received."""

    move: int
    """Move number, as assigned by the coordinator: 1, 2, 3, ... in a job."""
    partitions: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Partitions that another server has handed over to this server."""

    move: int
    images: Mapping[int, PartitionImage]
    """Partition id -> image. Its tensors become the server's own when the shard map assigns the
    partition to this server."""

    def copy(self) -> Taken:
        """Returns a copy whose tensors are independent."""
        return replace(self, images={number: image.copy() for number, image in self.images.items()})


class Moves:
    """Partitions that one server is giving away and receiving.

    Invariants: `leaving` partitions are in the shard and frozen. `taken` and `coming` partitions
    are not served and not in the shard, with one exception: a copy may arrive a second time just
    after the shard map has assigned the first copy to this server. The second copy is then ignored,
    and dropped when its move is decided.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        settled: int = 0,
        leaving: Leaving | None = None,
        taken: Taken | None = None,
        coming: Taken | None = None,
    ) -> None:
        """Restores the state from a snapshot. By default, no move is in progress."""
        self._shard = shard
        self.settled = settled
        """Number of the last move that the coordinator has decided."""
        self.leaving = leaving
        self.taken = taken
        """All partitions of a completely received move; None if there is none."""
        self.coming = coming
        """Partitions received so far in an incomplete move. They are ignored until all have
        arrived."""
        self.before_drop: Callable[[Collection[int]], None] = lambda partition_ids: None
        """Callback for partitions that are about to be dropped. Set by the code that copies the
        shard."""
        if leaving is not None:
            shard.freeze(leaving.partitions)

    def bring(self, move: int, image: PartitionImage) -> None:
        """Adds a received partition of a move, replacing an earlier copy from the same move.
        Ignores a partition of a move older than the current one."""
        if self._is_late(move):
            return
        before = {} if self.coming is None or self.coming.move != move else self.coming.images
        self.coming = Taken(move=move, images={**before, image.spec.partition_id: image})

    def take(
        self, move: int, partition_ids: Iterable[int], batches: Iterable[tuple[int, int]]
    ) -> None:
        """Completes a move whose partitions have all arrived. If the move is outdated or a
        partition is missing, only the batches are recorded.

        `batches`: ranges of finished batches, as recorded by the giver.
        """
        self._shard.add_batches(batches)
        wanted = frozenset(partition_ids)
        if (
            self._is_late(move)
            or self.coming is None
            or self.coming.move != move
            or not wanted <= self.coming.images.keys()
        ):
            return
        self.taken = Taken(
            move=move, images={number: self.coming.images[number] for number in sorted(wanted)}
        )
        self.coming = None

    def _is_late(self, move: int) -> bool:
        return move <= self.settled or any(
            each is not None and move < each.move for each in (self.taken, self.coming)
        )

    def leave(self, move: int, partition_ids: Iterable[int]) -> None:
        """Records that another server has received these partitions. From now on, only the
        coordinator decides what happens to them."""
        self.leaving = Leaving(move=move, partitions=frozenset(partition_ids))
        self._shard.freeze(self.leaving.partitions)

    def check(self, layout: Layout, *, before: Layout | None) -> None:
        """Raises PreconditionError / LAYOUT_CONFLICT for a shard map that would silently lose
        values: it assigns partitions to this server that were not handed over, has different
        tensors for them, or omits partitions that were not given away.

        `before`: the server's previous shard map; None if it had none.
        """
        arriving, gone = self._changed_by(layout)
        known = {} if before is None else before.partitions
        wrong = {
            number
            for number, spec in layout.partitions.items()
            if number in known and known[number] != spec
        }
        wrong |= gone - (frozenset() if self.leaving is None else self.leaving.partitions)
        if before is not None:
            wrong |= arriving - (frozenset() if self.taken is None else self.taken.images.keys())
        if wrong:
            since = "" if before is None else f" since epoch {before.epoch}"
            raise PreconditionError(
                f"the shard map at epoch {layout.epoch} does not match the partitions of this "
                f"server{since}: {_shown(wrong)} changed their owner without being handed "
                "over; start the server with an empty data directory, or use another job",
                reason="LAYOUT_CONFLICT",
            )

    def changes_with(self, layout: Layout) -> bool:
        """Returns whether this server loses partitions, or gains partitions with values, when it
        adopts `layout`."""
        arriving, gone = self._changed_by(layout)
        return bool(gone) or (self.taken is not None and not arriving.isdisjoint(self.taken.images))

    def adopt(self, layout: Layout, *, before: Layout | None, members: AbstractSet[str]) -> None:
        """Adopts a shard map: from now on partitions assigned to this server are served, and all
        others are dropped. Raises the errors of `check` before anything has changed.

        `before`: as in `check`. `members`: members whose sequence numbers are kept.
        """
        self.check(layout, before=before)
        arriving, gone = self._changed_by(layout)
        if gone:
            self.before_drop(gone)
            self._shard.drop(gone)
            if self.leaving is not None:
                self.leaving = _rest_of(self.leaving, gone)
        if self.taken is not None and (mine := arriving & self.taken.images.keys()):
            for number in sorted(mine):
                self._shard.put(self.taken.images[number])
            self._shard.forget_all_but(members)
            others = {
                number: image for number, image in self.taken.images.items() if number not in mine
            }
            self.taken = replace(self.taken, images=others) if others else None
        self._shard.adopt(layout)

    def settle(self, move: int) -> None:
        """Ends all moves up to `move`. Called after the shard map with their outcome has been
        adopted: partitions that remain in `leaving` stay on this server; partitions that remain in
        `taken` or `coming` belong to another server and are dropped."""
        self.settled = max(self.settled, move)
        if self.taken is not None and self.taken.move <= move:
            self.taken = None
        if self.coming is not None and self.coming.move <= move:
            self.coming = None
        if self.leaving is not None and self.leaving.move <= move:
            self._shard.thaw(self.leaving.partitions)
            self.leaving = None

    def is_open(self, move: int) -> bool:
        """Returns whether any partition waits for the coordinator's decision about a move up to
        `move`."""
        return any(
            each is not None and each.move <= move
            for each in (self.leaving, self.taken, self.coming)
        )

    def _changed_by(self, layout: Layout) -> tuple[frozenset[int], frozenset[int]]:
        """Returns the partitions that `layout` adds, and the partitions that it removes."""
        held = frozenset(self._shard.partition_ids())
        return frozenset(layout.partitions) - held, held - layout.partitions.keys()


def _rest_of(leaving: Leaving, gone: AbstractSet[int]) -> Leaving | None:
    rest = leaving.partitions - gone
    return replace(leaving, partitions=rest) if rest else None


def _shown(partition_ids: AbstractSet[int]) -> str:
    first = ", ".join(map(str, sorted(partition_ids)[:5]))
    return f"partitions {first}" + (
        f" and {len(partition_ids) - 5} more" if len(partition_ids) > 5 else ""
    )
