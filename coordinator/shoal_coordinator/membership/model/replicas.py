"""Compares the replicated state of members after the run's last step. Pure functions.

Members leave one after another and do not wait for the comparison: each is compared with the
members that have left before. The digests are computed before any code after the training loop
runs, so later changes by the script are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_MOST_NAMED: Final = 4


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Digests of a leaving member's state (shoal.v1.Replicas)."""

    generation: int
    step: int
    agreed: int
    digests: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class ReplicasSeen:
    """Digests of the state of the members that have left so far, for one step of one generation."""

    generation: int
    step: int
    agreed: int
    """Newest step after which the ranks had compared their state and found it the same, as reported
    by any of the members."""
    digests: Mapping[str, tuple[int, str]]
    """Group of tensors -> its digest, and a description of the first member that reported this
    digest."""


def compare(seen: ReplicasSeen | None, left: Replicas, who: str) -> tuple[ReplicasSeen, str]:
    """Compares a leaving member's state with the state of members that left before.

    Args:
        seen: digests of the members that left before; None if none has left yet.
        left: digests of the leaving member.
        who: human-readable description of the leaving member.

    Returns the updated digests and a description of the difference. The description is empty if
    there is no difference, or if no other member has reported the same step of the same generation.
    """
    if seen is None or (seen.generation, seen.step) != (left.generation, left.step):
        known = {group: (digest, who) for group, digest in left.digests.items()}
        return ReplicasSeen(
            generation=left.generation, step=left.step, agreed=left.agreed, digests=known
        ), ""
    agreed = max(seen.agreed, left.agreed)
    apart = [
        group
        for group, digest in left.digests.items()
        if seen.digests.get(group, (digest, ""))[0] != digest
    ]
    known = {group: (digest, who) for group, digest in left.digests.items()} | dict(seen.digests)
    now = ReplicasSeen(generation=left.generation, step=left.step, agreed=agreed, digests=known)
    if not apart:
        return now, ""
    others = list(dict.fromkeys(seen.digests[group][1] for group in apart))
    since = f"all agreed after step {agreed}" if agreed else "the ranks had not compared before"
    return (
        now,
        f"after step {left.step}, the last one, {who} and {_listed(others)} had different values "
        f"of {_listed(apart)}; {since}",
    )


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
