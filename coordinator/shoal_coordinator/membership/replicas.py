"""Compares what members held in common after the run's last step. Pure.

Members leave one after another, and none waits for this: each is compared with those that left
before it. What a script changes after its loop is not in these digests, so ranks may differ then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_MOST_NAMED: Final = 4


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The state of one member as it leaves. The fields are those of shoal.v1.Replicas."""

    generation: int
    step: int
    agreed: int
    digests: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class ReplicasSeen:
    """The states of members that have left."""

    generation: int
    step: int
    agreed: int
    """The newest that one of them reported: whoever compared had the digests of all."""
    digests: Mapping[str, tuple[int, str]]
    """Group of tensors -> its digest, and the first member that reported it, for people."""


def compare(seen: ReplicasSeen | None, left: Replicas, who: str) -> tuple[ReplicasSeen, str]:
    """Compares a member that leaves with those before it.

    seen: None if nobody has left yet.
    who: the member that leaves, for people.

    Returns what is known now, and how the member differs; empty if it does not, or if nobody
    reported of the same step of the same generation.
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
    since = f"after step {agreed} all agreed" if agreed else "the ranks had not compared before"
    return (
        now,
        f"after step {left.step}, the last one, {who} and {_listed(others)} hold different values "
        f"of {_listed(apart)}; {since}",
    )


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
