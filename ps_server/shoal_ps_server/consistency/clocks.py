"""The clocks of asp and ssp(bound): a pure core without time, waiting or I/O. `membership.py` waits on it.

A member's clock counts its iterations. It is counted from the member's own first report, so members may number their iterations from
wherever they like, and a joiner, whatever it says first, stands where the slowest then is. A member that leaves stops counting.

ssp (Ho et al., NIPS 2013): a member may begin its next iteration while its clock is at most `bound` above the slowest member's. The
slowest is never held up by this, so somebody can always go on.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_LARGEST = 2**62
"""Clocks saturate here, so that a report of the largest int64 ("wait for me no more") cannot overflow one."""


class ConsistencyMode(enum.Enum):
    """Who waits for whom."""

    ASP = "asp"
    """Nobody."""
    SSP = "ssp"
    """Whoever is more than `bound` clocks ahead of the slowest."""


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """A job's consistency."""

    mode: ConsistencyMode = ConsistencyMode.ASP
    bound: int = 0
    """Clocks; ssp only."""


@dataclass(frozen=True, kw_only=True)
class MemberClock:
    """One member's progress."""

    clock: int
    """Where it stands among the others; never falls."""
    origin: int | None = None
    """`clock` = origin + what the member reports; None before its first report."""


class Clocks:
    """The clocks of the current members. Invariants: no clock falls, and neither does `slowest`; every member's clock >= `slowest`."""

    def __init__(self, *, members: Mapping[str, MemberClock] | None = None, slowest: int = 0) -> None:
        """`members`: those that are there already."""
        self._members = dict(members or {})
        self._slowest = slowest

    @property
    def slowest(self) -> int:
        """The slowest member's clock; what it was last when there are no members."""
        return self._slowest

    @property
    def members(self) -> Mapping[str, MemberClock]:
        """A copy."""
        return dict(self._members)

    def follow(self, members: Iterable[str]) -> None:
        """Takes over the membership: joiners start at the slowest clock, and those who are gone no longer count."""
        self._members = {member: self._members.get(member) or MemberClock(clock=self._slowest) for member in members}
        self._settle()

    def report(self, member: str, finished: int) -> None:
        """A member says that it has finished `finished` iterations, as it counts them; what it said before may come again."""
        known = self._members[member]
        origin = known.clock - finished if known.origin is None else known.origin
        self._members[member] = MemberClock(clock=min(max(known.clock, origin + finished), _LARGEST), origin=origin)
        self._settle()

    def has_reported(self, member: str) -> bool:
        """Whether it is known where the member's count begins."""
        return self._members[member].origin is not None

    def lead(self, member: str) -> int:
        """How far a member is ahead of the slowest."""
        return self._members[member].clock - self._slowest

    def may_proceed(self, member: str, consistency: Consistency) -> bool:
        """Whether a member may begin its next iteration now."""
        return consistency.mode is ConsistencyMode.ASP or self.lead(member) <= consistency.bound

    def _settle(self) -> None:
        if self._members:
            self._slowest = min(each.clock for each in self._members.values())
