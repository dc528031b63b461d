"""Partitions that are on their way between this server and another one, as the journal has it
(docs/decisions/0200).

What leaves stays here, frozen, and what was taken is not served, until the coordinator's shard map
says whose it is. The server that runs, the one that recovers and its backup all come to it by the
methods below, one for each kind of record. Belongs to the event loop.
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
    """Partitions that another server has taken, or may have."""

    move: int
    """The coordinator's number of the move: 1, 2, 3, ... in a job."""
    partitions: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Partitions that another server has handed over."""

    move: int
    images: Mapping[int, PartitionImage]
    """Partition id -> image. Its tensors become the server's own when the shard map gives it the
    partition."""

    def copy(self) -> Taken:
        """Tensors of its own."""
        return replace(self, images={number: image.copy() for number, image in self.images.items()})


class Moves:
    """What one server gives and takes.

    Invariants: what is `leaving` is in the shard, and frozen; what is `taken` or `coming` is not
    served from there. It is not in the shard either, but for a copy that came again just when the
    shard map had given the first one to this server: that one counts for nothing, and is gone when
    its move is settled.
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
        """What a snapshot has of them; else nothing is on its way."""
        self._shard = shard
        self.settled = settled
        """The coordinator has decided on all moves up to this one."""
        self.leaving = leaving
        self.taken = taken
        """All partitions of a move."""
        self.coming = coming
        """Those of a move that have come so far; they count once all have."""
        self.before_drop: Callable[[Collection[int]], None] = lambda partition_ids: None
        """Told of partitions that are about to go, by whoever is copying the shard."""
        if leaving is not None:
            shard.freeze(leaving.partitions)

    def bring(self, move: int, image: PartitionImage) -> None:
        """One partition of a move is here. One that came before, in the same move, is forgotten for
        it. Of an older move than what is here already it is late, and nothing."""
        if self._is_late(move):
            return
        before = {} if self.coming is None or self.coming.move != move else self.coming.images
        self.coming = Taken(move=move, images={**before, image.spec.partition_id: image})

    def take(
        self, move: int, partition_ids: Iterable[int], batches: Iterable[tuple[int, int]]
    ) -> None:
        """All partitions of a move are here. Where that is late, too, or one of them is not here,
        nothing is taken. `batches`: runs of finished ones, as the giver knows them, which they are
        in any case."""
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
        """Another server has these: from now on only the coordinator's word ends it."""
        self.leaving = Leaving(move=move, partitions=frozenset(partition_ids))
        self._shard.freeze(self.leaving.partitions)

    def check(self, layout: Layout, *, before: Layout | None) -> None:
        """Raises PreconditionError / LAYOUT_CONFLICT for a map by which values would be lost
        without a word: of a server that knew a map `before`, it names partitions that nobody handed
        over, or other tensors in them, or leaves some out that were not given away."""
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
                f"the shard map at epoch {layout.epoch} gives this server other partitions than it "
                f"holds{since}: {_shown(wrong)} were handed over neither to it nor by it; start it "
                "with an empty data directory, or use another job",
                reason="LAYOUT_CONFLICT",
            )

    def changes_with(self, layout: Layout) -> bool:
        """Whether this server gives up or gets a partition that has values by a map."""
        arriving, gone = self._changed_by(layout)
        return bool(gone) or (self.taken is not None and not arriving.isdisjoint(self.taken.images))

    def adopt(self, layout: Layout, *, before: Layout | None, members: AbstractSet[str]) -> None:
        """A shard map counts from now on: what it gives this server is served, and what it does not
        is dropped. `members`: those of whom sequence numbers are kept. Raises as `check`; nothing
        has changed then."""
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
        """The coordinator has decided on all moves up to this one, and the map that says so was
        adopted: what is still leaving stays, and what is still taken belongs to another server."""
        self.settled = max(self.settled, move)
        if self.taken is not None and self.taken.move <= move:
            self.taken = None
        if self.coming is not None and self.coming.move <= move:
            self.coming = None
        if self.leaving is not None and self.leaving.move <= move:
            self._shard.thaw(self.leaving.partitions)
            self.leaving = None

    def is_open(self, move: int) -> bool:
        """Whether something here waits for the coordinator to decide on a move up to this one."""
        return any(
            each is not None and each.move <= move
            for each in (self.leaving, self.taken, self.coming)
        )

    def _changed_by(self, layout: Layout) -> tuple[frozenset[int], frozenset[int]]:
        """What would come, and what would go."""
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
