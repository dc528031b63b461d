"""Determines which ranks have each shard of a state, which sharding is still complete, which rank
sends each shard, and which shards must be copied to another rank.

These are pure functions: all ranks reach the same decisions from the claims that they have
exchanged. A *place* identifies a shard. In the package `sharding`, it is the shard's position; in
`mesh`, it is the stage, part and position. These two packages transfer the shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shoal_worker.elastic.contract.loader_interface import StateLostError

Place = TypeVar("Place", int, tuple[int, int, int])


class ShardsLostError(StateLostError):
    """Raised when some shard of the model is no longer on any rank."""

    def __init__(self, *, lost: int, shards: int) -> None:
        """`lost`: number of lost shards. `shards`: total number of shards."""
        which = (
            f"{lost} of the model's {shards} shards" if lost < shards else "any shard of the model"
        )
        super().__init__(
            f"no rank holds {which} any more, because all ranks that did are gone; only a "
            "checkpoint can restore them. Within an epoch, a script that calls "
            "shoal.save_checkpoint returns to the newest checkpoint by itself; after a restart, "
            "a script that calls shoal.resume continues from it",
            reason="SHARDS_LOST",
        )


@dataclass(frozen=True, kw_only=True)
class Claim(Generic[Place]):
    """Message in which a rank lists the shards of one sharding that it has."""

    rank: int
    cut: int
    """Number of the sharding. Newer shardings have higher numbers."""
    shards: int
    """Total number of shards on all ranks."""
    places: Collection[Place]
    copied: bool
    """True if these shards are copies of shards held by other ranks."""


@dataclass(frozen=True, kw_only=True)
class Copy(Generic[Place]):
    """Planned copy of a shard to a second rank."""

    place: Place
    sender: int
    mirror_holder: int


@dataclass(kw_only=True)
class ShardHolders(Generic[Place]):
    """Ranks that hold or mirror each shard of one sharding."""

    cut: int
    """Number of the sharding."""
    shards: int
    """Number of shards."""
    holders: dict[Place, list[int]] = field(default_factory=dict)
    """Ranks that hold each shard, ascending."""
    mirror_holders: dict[Place, list[int]] = field(default_factory=dict)
    """Ranks that have a copy (mirror) of each shard, ascending."""

    @property
    def lost(self) -> int:
        """Number of shards that no rank holds or mirrors."""
        return self.shards - len(self.sources())

    def sources(self) -> dict[Place, list[int]]:
        """Returns the ranks that can send each shard: its holders, or the ranks with a copy if
        there is no holder."""
        return self.mirror_holders | self.holders

    def having(self, place: Place) -> list[int]:
        """Returns all ranks that have a shard or a copy of it."""
        return [*self.holders.get(place, ()), *self.mirror_holders.get(place, ())]

    def senders(self) -> dict[Place, int]:
        """Returns the rank that sends each shard if every shard is sent once. Distributes the
        shards evenly."""
        turns = SendingTurns()
        return {place: turns.choose(ranks) for place, ranks in sorted(self.sources().items())}


def newest_complete(claims: Iterable[Claim[Place]]) -> ShardHolders[Place]:
    """Returns the newest sharding in which every shard has a holder or a copy. `claims`: all ranks'
    claims; a rank may make several.

    Raises:
        ShardsLostError: no sharding is complete.
    """
    cuts: dict[int, ShardHolders[Place]] = {}
    for claim in sorted(claims, key=lambda claim: claim.rank):
        cut = cuts.setdefault(claim.cut, ShardHolders(cut=claim.cut, shards=claim.shards))
        for place in claim.places:
            (cut.mirror_holders if claim.copied else cut.holders).setdefault(place, []).append(
                claim.rank
            )
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
    """Plans copies so that, after the ranks in `leaving` have left, at least two ranks have each
    shard.

    No copy is planned for a shard if every other remaining rank already keeps `most` copies.

    Args:
        held: the holders of all shards in a complete sharding.
        ranks: all ranks, including those in `leaving`.
        leaving: ranks that are about to leave.
        most: maximum number of copies per rank; None: unlimited.
    """
    staying = [rank for rank in ranks if rank not in leaving]
    kept = Counter(
        rank for mirror_holders in held.mirror_holders.values() for rank in mirror_holders
    )
    copies = []
    for place, sources in sorted(held.sources().items()):
        having = held.having(place)
        if sum(rank in staying for rank in having) > 1:
            continue
        free = [
            rank for rank in staying if rank not in having and (most is None or kept[rank] < most)
        ]
        if free:
            mirror_holder = min(free, key=lambda rank: (kept[rank], rank))
            kept[mirror_holder] += 1
            copies.append(Copy(place=place, sender=min(sources), mirror_holder=mirror_holder))
    return copies


class SendingTurns:
    """Chooses, among several ranks that can send the same data, the one that has sent the least so
    far."""

    def __init__(self) -> None:
        self._sent: Counter[int] = Counter()

    def choose(self, candidates: Iterable[int], amount: int = 1) -> int:
        """Chooses a sender, and records that it sends `amount` (in any unit)."""
        chosen = min(candidates, key=lambda one: (self._sent[one], one))
        self._sent[chosen] += amount
        return chosen
