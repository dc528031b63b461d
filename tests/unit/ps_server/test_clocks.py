"""asp and ssp: who may go on. The core is checked against what ssp promises, whatever the order of events."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule
from shoal_ps_server.consistency.clocks import Clocks, Consistency, ConsistencyMode, MemberClock

ASP = Consistency()


def ssp(bound: int) -> Consistency:
    return Consistency(mode=ConsistencyMode.SSP, bound=bound)


def test_asp_holds_nobody_up() -> None:
    clocks = Clocks()
    clocks.follow(["fast", "slow"])
    clocks.report("fast", 0)
    clocks.report("fast", 1000)
    assert clocks.may_proceed("fast", ASP)


def test_ssp_holds_up_who_is_more_than_the_bound_ahead() -> None:
    clocks = Clocks()
    clocks.follow(["fast", "slow"])
    for member in ("fast", "slow"):
        clocks.report(member, 0)
    clocks.report("fast", 2)
    assert clocks.may_proceed("fast", ssp(2))
    assert not clocks.may_proceed("fast", ssp(1))
    clocks.report("slow", 1)
    assert clocks.may_proceed("fast", ssp(1))


def test_a_silent_member_counts_from_the_start() -> None:
    clocks = Clocks()
    clocks.follow(["fast", "silent"])
    clocks.report("fast", 0)
    clocks.report("fast", 1)
    assert not clocks.may_proceed("fast", ssp(0))


def test_a_joiner_starts_where_the_slowest_stands_however_it_counts() -> None:
    clocks = Clocks()
    clocks.follow(["a"])
    clocks.report("a", 0)
    clocks.report("a", 100)
    clocks.follow(["a", "fresh", "resumed"])
    clocks.report("fresh", 0)
    clocks.report("resumed", 5000)
    assert {member: each.clock for member, each in clocks.members.items()} == {"a": 100, "fresh": 100, "resumed": 100}
    clocks.report("resumed", 5003)
    assert clocks.lead("resumed") == 3


def test_a_member_that_leaves_stops_counting() -> None:
    clocks = Clocks()
    clocks.follow(["fast", "slow"])
    clocks.report("fast", 0)
    clocks.report("fast", 9)
    assert not clocks.may_proceed("fast", ssp(3))
    clocks.follow(["fast"])
    assert (clocks.slowest, clocks.may_proceed("fast", ssp(3))) == (9, True)


def test_a_repeated_report_does_not_turn_a_clock_back() -> None:
    clocks = Clocks()
    clocks.follow(["a"])
    for finished in (0, 4, 2, 4):
        clocks.report("a", finished)
    assert clocks.slowest == 4


def test_the_largest_report_frees_all_others_for_good() -> None:
    clocks = Clocks()
    clocks.follow(["done", "a"])
    clocks.report("done", 0)
    clocks.report("done", 2**63 - 1)
    clocks.report("a", 0)
    clocks.report("a", 7)
    assert (clocks.slowest, clocks.may_proceed("a", ssp(0))) == (7, True)


def test_an_emptied_job_goes_on_where_it_was() -> None:
    clocks = Clocks()
    clocks.follow(["a"])
    clocks.report("a", 0)
    clocks.report("a", 7)
    clocks.follow([])
    clocks.follow(["b"])
    assert clocks.members["b"] == MemberClock(clock=7)


class StaleSynchronousParallel(RuleBasedStateMachine):
    """Members that do what ssp allows them, joining and leaving at any time."""

    members = Bundle("members")

    def __init__(self) -> None:
        super().__init__()
        self.clocks = Clocks()
        self.consistency = ssp(2)
        self.iterations: dict[str, int] = {}
        """What each member itself would say."""
        self.begun: dict[str, int] = {}
        """The clock at which each member last was let go on, and was then at most `bound` ahead."""
        self.count = 0
        self.slowest_seen = 0

    @rule(target=members, start=st.integers(0, 10**6))
    def join(self, start: int) -> str:
        self.count += 1
        member = f"member-{self.count}"
        self.clocks.follow([*self.iterations, member])
        self.iterations[member] = start
        assert self.clocks.lead(member) == 0
        return member

    @rule(member=consumes(members))
    def leave(self, member: str) -> None:
        del self.iterations[member]
        self.clocks.follow(list(self.iterations))

    @rule(member=members)
    def work(self, member: str) -> None:
        """Pull (report, maybe wait) and, if let go on, finish an iteration."""
        self.clocks.report(member, self.iterations[member])
        if not self.clocks.may_proceed(member, self.consistency):
            return
        self.iterations[member] += 1
        self.clocks.report(member, self.iterations[member])

    @rule(member=members, back=st.integers(0, 5))
    def repeat(self, member: str, back: int) -> None:
        before = self.clocks.members[member]
        if before.origin is not None:
            self.clocks.report(member, max(0, self.iterations[member] - back))
            assert self.clocks.members[member] == before

    @rule(target=members, member=consumes(members))
    def come_back(self, member: str) -> str:
        self.leave(member)
        self.clocks.follow([*self.iterations, member])
        self.iterations[member] = 0
        return multiple(member)

    @precondition(lambda self: self.iterations)
    @invariant()
    def nobody_is_more_than_one_iteration_beyond_the_bound(self) -> None:
        """It begins one at most `bound` ahead, and so ends it at most bound + 1 ahead."""
        assert all(0 <= self.clocks.lead(member) <= self.consistency.bound + 1 for member in self.iterations)

    @precondition(lambda self: self.iterations)
    @invariant()
    def somebody_can_always_go_on(self) -> None:
        assert any(self.clocks.may_proceed(member, self.consistency) for member in self.iterations)

    @invariant()
    def the_slowest_clock_never_falls(self) -> None:
        assert self.clocks.slowest >= self.slowest_seen
        self.slowest_seen = self.clocks.slowest


TestStaleSynchronousParallel = StaleSynchronousParallel.TestCase
TestStaleSynchronousParallel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
