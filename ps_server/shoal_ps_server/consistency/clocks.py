"""Clocks of the consistency models asp, ssp(bound) and bsp: a pure core without time, waiting or
I/O. `membership.py` implements the waits.

A member's clock counts the iterations since its own first report, so members may number their
iterations from any value. A joiner starts at the clock of the slowest member, regardless of its
first reported number. Members that have left are ignored. A resting member is ignored until its
next report, when it starts like a joiner.

ssp (Ho et al., NIPS 2013): a member may start its next iteration while its clock is at most `bound`
ahead of the slowest member's clock. The slowest member itself never waits, so some member can
always proceed.

bsp (Valiant, "A Bridging Model for Parallel Computation", CACM 1990): like ssp with a bound of 0;
in addition, a push of iteration k + 1 is admitted only when every member has read the values of
iteration k. Values read in an iteration therefore contain all pushes of earlier iterations and no
later pushes. A member has read the values when it reports this, or when its own push of iteration k
+ 1 arrives. Once one push of an iteration has been admitted, the iteration is open, and its other
pushes are admitted too. A member that joins or returns after that starts after this iteration."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

_LARGEST = 2**62
"""Upper limit of clocks and reports. If a member reports this value or more, no member waits for it
any longer, and the report is not counted. Clocks never exceed this value, so they cannot overflow
an int64."""


class ConsistencyMode(enum.Enum):
    """Consistency model, which determines when a member waits for other members."""

    ASP = "asp"
    """No member waits."""
    SSP = "ssp"
    """Members that are more than `bound` clocks ahead of the slowest member wait."""
    BSP = "bsp"
    """All members wait for each other twice per iteration: a pull waits for all pushes of the
    previous iteration, and a push waits for all pulls before it."""


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """Consistency model of a job."""

    mode: ConsistencyMode = ConsistencyMode.ASP
    bound: int = 0
    """Bound in clocks; 0 with bsp, ignored with asp."""


@dataclass(frozen=True, kw_only=True)
class MemberClock:
    """Progress of one member."""

    clock: int
    """Number of iterations of the member, comparable with the clocks of other members; never
    decreases."""
    origin: int | None = None
    """Difference between `clock` and the iteration that the member reports. None before the first
    report and while the member is resting."""
    has_read: bool = False
    """True if the member has read the values of iteration `clock`. Known only under bsp, and only
    to the process that received the pull."""
    takes_part: bool = False
    """True if the member has read or pushed since it got its starting clock. It then has the same
    clock on all servers. Known only under bsp."""
    rests: bool = False
    """True if no member waits for this member until its next report."""


class Clocks:
    """Clocks of the current members. Invariants: clocks, `slowest` and `opened` never decrease; the
    clock of every member that is not resting is >= `slowest` and, under bsp, >= `opened` - 1."""

    def __init__(
        self, *, members: Mapping[str, MemberClock] | None = None, slowest: int = 0, opened: int = 0
    ) -> None:
        """`members`: clocks of existing members."""
        self._members = dict(members or {})
        self._slowest = slowest
        self._opened = opened

    @property
    def slowest(self) -> int:
        """Clock of the slowest member. While all members are resting, keeps its last value."""
        return self._slowest

    @property
    def opened(self) -> int:
        """Under bsp, the newest iteration with an admitted push; 0 if there is none."""
        return self._opened

    @property
    def members(self) -> Mapping[str, MemberClock]:
        """Copy of the members' clocks."""
        return dict(self._members)

    def follow(self, members: Iterable[str]) -> None:
        """Adopts the members of a generation: joiners start at the slowest clock, and former
        members are removed."""
        self._members = {
            member: self._members.get(member) or MemberClock(clock=self._start)
            for member in members
        }
        self._settle()

    def report(self, member: str, finished: int, *, place: int = 0) -> None:
        """Records that a member has finished `finished` iterations by its own count. `_LARGEST` or
        more means that the member is resting. A report may be repeated.

        `place`: clock that corresponds to this report, unless the member's clock is already higher;
        0: derive it from the member's earlier reports.
        """
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
            takes_part=known.takes_part
            and not place,  # other servers may give the member a later starting clock
        )
        return self._settle()

    def has_read(self, member: str, finished: int) -> None:
        """Records that a member has read the values at the end of its iteration `finished`, which
        it uses in the next iteration."""
        finished = min(finished, _LARGEST - 1)  # `_LARGEST` would mean that the member is resting
        self.report(member, finished)
        known = self._members[member]
        assert known.origin is not None, "it has just reported"
        if known.origin + finished >= known.clock:
            self._members[member] = replace(known, has_read=True, takes_part=True)

    def rest(self, member: str) -> None:
        """Records that a member is idle or leaving, so that no other member waits for it until its
        next report."""
        self._members[member] = MemberClock(clock=self._members[member].clock, rests=True)
        self._settle()

    def arrive(self, member: str, finished: int) -> int:
        """Records the arrival of a push under bsp. `finished`: number of the iteration that the
        push completes, as numbered by the member. Returns the number of this iteration on the
        server.

        A push proves that the member has read its values. If the member had already finished the
        iteration on this server, the push counts for its next iteration.
        """
        finished = min(finished, _LARGEST)
        self.report(member, max(0, finished - 1))
        known = self._members[member] = replace(
            self._members[member], has_read=True, takes_part=True
        )
        assert known.origin is not None, "it has just reported"
        return min(max(known.origin + finished, known.clock + 1), _LARGEST)

    def awaited(self, iteration: int) -> list[str]:
        """Returns the members that have not yet read the values that a push of this bsp iteration
        would change. Once the result is empty, the iteration's pushes are admitted."""
        if iteration <= self._opened:
            return []
        return sorted(
            m
            for m, each in self._members.items()
            if not each.rests and each.clock + each.has_read < iteration
        )

    def open(self, iteration: int) -> None:
        """Records that a push of a bsp iteration has been admitted."""
        self._opened = max(self._opened, iteration)

    def has_pushed(self, member: str) -> None:
        """Records that an earlier process of this server has admitted a push of the member under
        bsp. The member must have reported before."""
        self._members[member] = replace(self._members[member], takes_part=True)

    def behind(self, member: str, bound: int) -> list[str]:
        """Returns the members more than `bound` clocks behind `member`."""
        least = self._members[member].clock - bound
        return sorted(
            m for m, each in self._members.items() if not each.rests and each.clock < least
        )

    def has_reported(self, member: str) -> bool:
        """Returns whether the member has reported, so that its own iteration numbers can be
        converted to clocks."""
        return self._members[member].origin is not None

    def lead(self, member: str) -> int:
        """Returns how many clocks a member is ahead of the slowest member."""
        return self._members[member].clock - self._slowest

    def may_proceed(self, member: str, consistency: Consistency) -> bool:
        """Returns whether a member may start its next iteration now."""
        return consistency.mode is ConsistencyMode.ASP or self.lead(member) <= consistency.bound

    @property
    def _start(self) -> int:
        """Starting clock of a new member: the slowest clock or, if higher, the newest iteration
        that has begun without the member."""
        return max(self._slowest, self._opened)

    def _settle(self) -> None:
        self._slowest = min(
            (each.clock for each in self._members.values() if not each.rests), default=self._slowest
        )
