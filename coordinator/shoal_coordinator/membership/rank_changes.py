"""How the ranks of a generation differ from those of the one before: what its members are told, and
what of them is written. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shoal_coordinator.membership.state import Generation, Rank, RankChange

MOST_REMOVED: Final = 1024
"""The most ranks that a change may remove and still be told: each is a number."""
MOST_ADDED: Final = 64
"""The most ranks that a change may add and still be told: each is some 130 bytes, to every member.
Above it the table is asked for."""
_WRITTEN_IN_PARTS: Final = 64
"""The least number of changes that are written one by one before the whole table is written
again."""


def change_between(before: Generation, ranks: Sequence[Rank]) -> RankChange | None:
    """What makes the ranks of `before` these. A member that moved counts as removed and added.
    None: it is more than is worth telling."""
    removed: list[int] = []
    added: list[int] = []
    old, old_ranks, rank_of = 0, before.ranks, before.rank_of
    for position, rank in enumerate(ranks):
        if old < len(old_ranks) and rank.is_same_place(old_ranks[old]):
            old += 1
            continue
        place = rank_of.get(rank.member_id, -1)
        if place > old and rank.is_same_place(old_ranks[place]):
            removed.extend(range(old, place))
            old = place + 1
        else:
            added.append(position)
        if len(added) > MOST_ADDED or len(removed) > MOST_REMOVED:
            return None
    removed.extend(range(old, len(old_ranks)))
    if len(removed) > MOST_REMOVED:
        return None
    return RankChange(since=before.number, removed=tuple(removed), added=tuple(added))


def changes_to_write(
    before: Generation | None, change: RankChange | None, number: int, world_size: int
) -> tuple[int, ...]:
    """Generation.written of the generation `number`."""
    if (
        before is None
        or before.written is None
        or change is None
        or len(before.written) >= max(_WRITTEN_IN_PARTS, world_size // 32)
    ):
        return ()
    return (*before.written, number)
