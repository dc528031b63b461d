"""Which of the ranks that were asked to leave go at a border: as many as can while ranks that stay hold all of the state. Pure.

Each rank tells all others what it holds and whether it was asked to leave. Where two ranks hold the only copies of a shard, one goes now;
the ranks that are left cut the state anew, and then nobody misses the other. If none can go, as when a model's last replica loses a rank,
all stop together: their scripts run on, and can save what they hold between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Told:
    """By one rank."""

    asked: bool
    """To leave."""
    excluded: bool
    """The coordinator has written a generation without it: it goes at this border."""
    holds: Sequence[str]
    """The parts of the state that it holds, by names that are the same on all ranks."""
    stopping: bool
    """This rank knows that the job stops. In such a job all ranks leave at one border, and the next step's closing says which."""
    joiners: bool
    """It knows of a generation with members that are not in this one."""


@dataclass(frozen=True, kw_only=True)
class WhoLeaves:
    """What follows."""

    now: frozenset[int]
    """Ranks that go at this border."""
    stop: bool
    """All are to stop, since those that were asked could never go alone."""


def who_leaves(told: Sequence[Told]) -> WhoLeaves:
    """From what all ranks told, in rank order. Every rank must pass the same list."""
    if any(each.stopping for each in told):
        return WhoLeaves(now=frozenset(), stop=False)
    copies = Counter(part for each in told for part in each.holds)
    now: set[int] = set()
    for rank, each in sorted(enumerate(told), key=lambda one: (not one[1].excluded, one[0])):
        if not each.asked:
            continue
        if each.excluded or all(copies[part] > 1 for part in each.holds):
            now.add(rank)
            copies.subtract(each.holds)
    lost = any(count < 1 for count in copies.values())
    stuck = not now and any(each.asked for each in told) and not any(each.joiners for each in told)
    return WhoLeaves(now=frozenset() if lost or stuck else frozenset(now), stop=lost or stuck)
