"""Differences between the ranks of consecutive generations, as sent to members and as written to
Redis. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shoal_coordinator.membership.model.state import Generation, Rank, RankChange

MOST_REMOVED: Final = 1024
"""Maximum number of removed ranks in a change; with more, the full table is sent."""
MOST_ADDED: Final = 64
"""Maximum number of added ranks in a change; with more, the full table is sent. Each added rank
costs about 130 bytes per recipient."""
_WRITTEN_IN_PARTS: Final = 64
"""Minimum number of changes that are written to Redis before the full table is written again."""


def change_between(before: Generation, ranks: Sequence[Rank]) -> RankChange | None:
    """Returns the change from the generation `before` to `ranks`; None if it is too large to be
    worth sending. A member whose rank changes counts as removed and added."""
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
    """Returns the value of `Generation.written` for generation `number`: the generations whose
    changes must be applied to the last full table; empty if the full table must be written."""
    if (
        before is None
        or before.written is None
        or change is None
        or len(before.written) >= max(_WRITTEN_IN_PARTS, world_size // 32)
    ):
        return ()
    return (*before.written, number)
