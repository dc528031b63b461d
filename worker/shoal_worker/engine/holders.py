"""Which ranks hold which shards of a state that is cut, and what follows from it: which cut is
still complete, who sends each shard, and which shards another rank is to keep a copy of.

Pure: out of what the ranks have told one another each computes the same. A shard has a *place*, by
which ranks name it: its position, for `sharding`; stage, part and position, for `mesh`. How shards
travel is the business of these two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shoal_worker.elastic.loader_interface import StateLostError

Place = TypeVar("Place", int, tuple[int, int, int])


class ShardsLostError(StateLostError):
    """Some shard of the model is held by no rank any more."""

    def __init__(self, *, lost: int, shards: int) -> None:
        """`lost`: how many of the model's `shards`."""
        which = (
            f"{lost} of the model's {shards} shards" if lost < shards else "any shard of the model"
        )
        super().__init__(
            f"nobody holds {which} any more: all ranks that did are gone, and only a checkpoint "
            "can replace them. A script that calls shoal.save_checkpoint goes back to the newest "
            "by itself within an epoch; started anew, one that calls shoal.resume goes on from it",
            reason="SHARDS_LOST",
        )


@dataclass(frozen=True, kw_only=True)
class Claim(Generic[Place]):
    """What one rank holds of one cut."""

    rank: int
    cut: int
    """Number of the cut: newer ones have higher numbers."""
    shards: int
    """How many shards the cut has, on all ranks together."""
    places: Collection[Place]
    copied: bool
    """The rank keeps copies of what others hold."""


@dataclass(frozen=True, kw_only=True)
class Copy(Generic[Place]):
    """A shard that one rank holds alone, and that another is to keep a copy of."""

    place: Place
    sender: int
    keeper: int


@dataclass(kw_only=True)
class ShardHolders(Generic[Place]):
    """Who holds the shards of one cut."""

    cut: int
    """Number of the cut."""
    shards: int
    """How many shards it has."""
    holders: dict[Place, list[int]] = field(default_factory=dict)
    """The ranks that hold each shard, ascending."""
    keepers: dict[Place, list[int]] = field(default_factory=dict)
    """The ranks that keep a copy of it, ascending."""

    @property
    def lost(self) -> int:
        """How many shards no rank has."""
        return self.shards - len(self.sources())

    def sources(self) -> dict[Place, list[int]]:
        """The ranks that each shard is to be had from: those that keep a copy where no rank holds
        it."""
        return self.keepers | self.holders

    def having(self, place: Place) -> list[int]:
        """All ranks that have a shard, or a copy of it."""
        return [*self.holders.get(place, ()), *self.keepers.get(place, ())]

    def senders(self) -> dict[Place, int]:
        """The rank that sends each shard, where each travels once."""
        turns = SendingTurns()
        return {place: turns.choose(ranks) for place, ranks in sorted(self.sources().items())}


def newest_complete(claims: Iterable[Claim[Place]]) -> ShardHolders[Place]:
    """The newest cut of which every shard is held, or kept as a copy, by some rank. `claims`: of
    all ranks; each may hold several cuts.

    Raises:
        ShardsLostError: no cut is complete.
    """
    cuts: dict[int, ShardHolders[Place]] = {}
    for claim in sorted(claims, key=lambda claim: claim.rank):
        cut = cuts.setdefault(claim.cut, ShardHolders(cut=claim.cut, shards=claim.shards))
        for place in claim.places:
            (cut.keepers if claim.copied else cut.holders).setdefault(place, []).append(claim.rank)
    newest_first = [cuts[number] for number in sorted(cuts, reverse=True)]
    for cut in newest_first:
        if not cut.lost:
            return cut
    newest = newest_first[0] if newest_first else ShardHolders[Place](cut=0, shards=0)
    raise ShardsLostError(lost=newest.lost, shards=newest.shards)


def plan_copies(
    held: ShardHolders[Place],
    ranks: Sequence[int],
    leaving: Collection[int],
    *,
    most: int | None = None,
) -> list[Copy[Place]]:
    """Says which shards are to be copied to which ranks, so that of the ranks that stay two have
    each.

    A shard is left out for which all others keep as many copies as they can.

    Args:
        held: of a cut that is complete.
        ranks: all that take part.
        leaving: those of them that are about to leave.
        most: shards that one rank keeps copies of; None: any number.
    """
    staying = [rank for rank in ranks if rank not in leaving]
    kept = Counter(rank for keepers in held.keepers.values() for rank in keepers)
    copies = []
    for place, sources in sorted(held.sources().items()):
        having = held.having(place)
        if sum(rank in staying for rank in having) > 1:
            continue
        free = [
            rank for rank in staying if rank not in having and (most is None or kept[rank] < most)
        ]
        if free:
            keeper = min(free, key=lambda rank: (kept[rank], rank))
            kept[keeper] += 1
            copies.append(Copy(place=place, sender=min(sources), keeper=keeper))
    return copies


class SendingTurns:
    """Whose turn it is to send, of those that have the same: who has sent least so far."""

    def __init__(self) -> None:
        self._sent: Counter[int] = Counter()

    def choose(self, candidates: Iterable[int], amount: int = 1) -> int:
        """The one that sends next. `amount`: of what is sent, in any unit."""
        chosen = min(candidates, key=lambda one: (self._sent[one], one))
        self._sent[chosen] += amount
        return chosen
