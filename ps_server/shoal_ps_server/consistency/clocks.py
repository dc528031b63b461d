"""The clocks of asp, ssp(bound) and bsp: a pure core without time, waiting or I/O. `membership.py`
waits on it.

A member's clock counts its iterations. It is counted from the member's own first report, so members
may number their iterations from wherever they like, and a joiner, whatever it says first, stands
where the slowest then is. A member that leaves stops counting; so does one that rests, until it
speaks again, and then it is placed like a joiner.

ssp (Ho et al., NIPS 2013): a member may begin its next iteration while its clock is at most `bound`
above the slowest member's. The slowest is never held up by this, so somebody can always go on.

bsp (Valiant, "A Bridging Model for Parallel Computation", CACM 1990): as ssp with a bound of 0, and
besides a push of iteration k + 1 is let in only when every member has read the values of iteration
k. So what is read in one iteration has all pushes of those before, and none of a later one. A
member has read them when it says so, or when its own push of iteration k + 1 comes. Once one push
of an iteration was let in, all of that iteration are: the iteration is open, and who comes then, or
comes back, begins behind it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

_LARGEST = 2**62
"""A report from here on is not counted: it says "wait for me no more". Clocks saturate here, so
that none overflows an int64."""


class ConsistencyMode(enum.Enum):
    """Who waits for whom."""

    ASP = "asp"
    """Nobody."""
    SSP = "ssp"
    """Whoever is more than `bound` clocks ahead of the slowest."""
    BSP = "bsp"
    """Everybody for everybody, twice in each iteration: pulls for all pushes of it, and pushes for
    all pulls before it."""


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """A job's consistency."""

    mode: ConsistencyMode = ConsistencyMode.ASP
    bound: int = 0
    """Clocks; with bsp 0, and with asp not looked at."""


@dataclass(frozen=True, kw_only=True)
class MemberClock:
    """One member's progress."""

    clock: int
    """Where it stands among the others; never falls."""
    origin: int | None = None
    """`clock` = origin + what the member reports; None before its first report, and while it
    rests."""
    has_read: bool = False
    """It has the values of iteration `clock`. Known under bsp alone, and to this process alone."""
    takes_part: bool = False
    """It has read or pushed since it was placed: its count is the same on all servers. Known under
    bsp alone."""
    rests: bool = False
    """Nobody waits for it until it reports again."""


class Clocks:
    """The clocks of the current members. Invariants: no clock falls, and neither do `slowest` and
    `opened`; the clock of every member that does not rest is >= `slowest`, and under bsp >=
    `opened` - 1."""

    def __init__(
        self, *, members: Mapping[str, MemberClock] | None = None, slowest: int = 0, opened: int = 0
    ) -> None:
        """`members`: those that are there already."""
        self._members = dict(members or {})
        self._slowest = slowest
        self._opened = opened

    @property
    def slowest(self) -> int:
        """The slowest member's clock; what it was last when nobody is there who does not rest."""
        return self._slowest

    @property
    def opened(self) -> int:
        """bsp: the last iteration of which a push was let in; 0: none."""
        return self._opened

    @property
    def members(self) -> Mapping[str, MemberClock]:
        """A copy."""
        return dict(self._members)

    def follow(self, members: Iterable[str]) -> None:
        """Takes over the membership: joiners start at the slowest clock, and those who are gone no
        longer count."""
        self._members = {
            member: self._members.get(member) or MemberClock(clock=self._start)
            for member in members
        }
        self._settle()

    def report(self, member: str, finished: int, *, place: int = 0) -> None:
        """A member says that it has finished `finished` iterations, as it counts them; what it said
        before may come again. `_LARGEST` or more: it `rest`s. `place`: the clock that this is, if
        it is not below where the member stands; 0: as it counted before."""
        if finished >= _LARGEST:
            return self.rest(member)
        known = self._members[member]
        placed = max(known.clock, self._start) if known.rests else known.clock
        origin = placed - finished if known.origin is None else known.origin
        if place:
            origin = max(placed, place) - finished
        clock = min(max(placed, origin + finished), _LARGEST)
        self._members[member] = replace(
            known,
            clock=clock,
            origin=origin,
            rests=False,
            has_read=known.has_read and clock == known.clock,
            takes_part=known.takes_part and not place,  # other servers may place it later
        )
        return self._settle()

    def has_read(self, member: str, finished: int) -> None:
        """A member says that it has the values with which its iteration after `finished` begins."""
        finished = min(finished, _LARGEST - 1)  # who reads does not rest
        self.report(member, finished)
        known = self._members[member]
        assert known.origin is not None, "it has just reported"
        if known.origin + finished >= known.clock:
            self._members[member] = replace(known, has_read=True, takes_part=True)

    def rest(self, member: str) -> None:
        """A member has nothing to do, or leaves: nobody is to wait for it until it reports
        again."""
        self._members[member] = MemberClock(clock=self._members[member].clock, rests=True)
        self._settle()

    def arrive(self, member: str, finished: int) -> int:
        """bsp: a push is here that will have finished iteration `finished`, as its member counts
        them. Returns its number here.

        It was computed on values that were read before. Where the member has finished that
        iteration already, on this server, the push belongs to its next one.
        """
        finished = min(finished, _LARGEST)
        self.report(member, max(0, finished - 1))
        known = self._members[member] = replace(
            self._members[member], has_read=True, takes_part=True
        )
        assert known.origin is not None, "it has just reported"
        return min(max(known.origin + finished, known.clock + 1), _LARGEST)

    def awaited(self, iteration: int) -> list[str]:
        """bsp: the members that have not read what pushes of this iteration would change; none:
        they may be let in."""
        if iteration <= self._opened:
            return []
        return sorted(
            m
            for m, each in self._members.items()
            if not each.rests and each.clock + each.has_read < iteration
        )

    def open(self, iteration: int) -> None:
        """bsp: a push of this iteration is let in."""
        self._opened = max(self._opened, iteration)

    def has_pushed(self, member: str) -> None:
        """bsp: a push of a member that has reported was let in, by another process."""
        self._members[member] = replace(self._members[member], takes_part=True)

    def behind(self, member: str, bound: int) -> list[str]:
        """The members that are more than `bound` clocks behind this one."""
        least = self._members[member].clock - bound
        return sorted(
            m for m, each in self._members.items() if not each.rests and each.clock < least
        )

    def has_reported(self, member: str) -> bool:
        """Whether it is known where the member's count begins."""
        return self._members[member].origin is not None

    def lead(self, member: str) -> int:
        """How far a member is ahead of the slowest."""
        return self._members[member].clock - self._slowest

    def may_proceed(self, member: str, consistency: Consistency) -> bool:
        """Whether a member may begin its next iteration now."""
        return consistency.mode is ConsistencyMode.ASP or self.lead(member) <= consistency.bound

    @property
    def _start(self) -> int:
        """Where who begins now stands: behind an iteration that has begun without it."""
        return max(self._slowest, self._opened)

    def _settle(self) -> None:
        self._slowest = min(
            (each.clock for each in self._members.values() if not each.rests), default=self._slowest
        )
