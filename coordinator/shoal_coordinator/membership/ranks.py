"""Rank assignment: who gets which rank in a new generation. Pure and deterministic."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from shoal_coordinator.membership.state import Member, Rank


def assign_ranks(survivors: Sequence[Member], joiners: Iterable[Member], *, is_joining: Callable[[Member], bool]) -> tuple[Rank, ...]:
    """Ranks of a generation, in rank order.

    The ranks of one host are adjacent. `survivors` come in their old rank order and keep it, hosts in the order of their first survivor;
    joiners follow within their host's block, new hosts after all others. Joiners among themselves, and new hosts, are ordered by name and
    not by arrival, so that the same machines get the same ranks in every run.
    """
    blocks: dict[str, list[Member]] = {}
    for member in survivors:
        blocks.setdefault(member.identity.host, []).append(member)
    for member in sorted(joiners, key=_place):
        blocks.setdefault(member.identity.host, []).append(member)
    return tuple(
        Rank(
            member_id=member.member_id,
            host=host,
            local_rank=local_rank,
            local_world_size=len(block),
            donor_address=member.identity.donor_address,
            donor_key=member.identity.donor_key,
            joining=is_joining(member),
        )
        for host, block in blocks.items()
        for local_rank, member in enumerate(block)
    )


def _place(member: Member) -> tuple[list[str | int], str, int, str]:
    identity = member.identity
    return (_natural(identity.host), identity.launcher_id, identity.local_index, identity.member_id)


def _natural(name: str) -> list[str | int]:
    """Sort key under which node2 comes before node10: text and numbers alternate, text first."""
    return [int(part) if position % 2 else part for position, part in enumerate(re.split(r"([0-9]+)", name))]
