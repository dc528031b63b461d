"""Assigns the ranks of a new generation. Pure and deterministic."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from shoal_coordinator.membership.model.state import Member, Rank


def assign_ranks(
    survivors: Sequence[Member],
    joiners: Iterable[Member],
    *,
    is_joining: Callable[[Member], bool],
    before: Mapping[str, Rank] | None = None,
) -> tuple[Rank, ...]:
    """Returns the ranks of a generation in order. `is_joining`: returns the value of `Rank.joining`
    for a member. `before`: previous ranks by member id, which are reused if unchanged.

    The ranks of one host are adjacent. `survivors` must be in their old rank order, which they
    keep; hosts are ordered by their first survivor. Joiners follow the survivors on their host, and
    hosts without survivors follow all other hosts. Joiners and new hosts are ordered by name rather
    than by arrival, so that the same machines get the same ranks in every run.
    """
    blocks: dict[str, list[Member]] = {}
    for member in survivors:
        blocks.setdefault(member.identity.host, []).append(member)
    for member in sorted(joiners, key=_place):
        blocks.setdefault(member.identity.host, []).append(member)
    known = before or {}
    return tuple(
        _rank(member, known.get(member.member_id), local_rank, len(block), is_joining(member))
        for block in blocks.values()
        for local_rank, member in enumerate(block)
    )


def _rank(
    member: Member, before: Rank | None, local_rank: int, local_world_size: int, joining: bool
) -> Rank:
    identity = member.identity
    if (
        before is not None
        and (before.local_rank, before.local_world_size, before.joining)
        == (local_rank, local_world_size, joining)
        and (before.host, before.donor_address, before.donor_key)
        == (identity.host, identity.donor_address, identity.donor_key)
    ):
        return before
    return Rank(
        member_id=identity.member_id,
        host=identity.host,
        local_rank=local_rank,
        local_world_size=local_world_size,
        donor_address=identity.donor_address,
        donor_key=identity.donor_key,
        joining=joining,
    )


def _place(member: Member) -> tuple[list[str | int], str, int, str]:
    identity = member.identity
    return (_natural(identity.host), identity.launcher_id, identity.local_index, identity.member_id)


def _natural(name: str) -> list[str | int]:
    """Returns a sort key that orders node2 before node10: alternating text and numbers, beginning
    with text."""
    return [
        int(part) if position % 2 else part
        for position, part in enumerate(re.split(r"([0-9]+)", name))
    ]
