"""The consistency modes asp, ssp and bsp decide which members may proceed. Their promises are
checked for arbitrary orders of events."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)
from shoal_ps_server.consistency.clocks import Clocks, Consistency, ConsistencyMode, MemberClock

ASP = Consistency()
BSP = Consistency(mode=ConsistencyMode.BSP)


def ssp(bound: int) -> Consistency:
    return Consistency(mode=ConsistencyMode.SSP, bound=bound)


def test_asp_delays_nobody() -> None:
    clocks = Clocks()
    clocks.follow(["fast", "slow"])
    clocks.report("fast", 0)
    clocks.report("fast", 1000)
    assert clocks.may_proceed("fast", ASP)


def test_ssp_holds_members_ahead_by_more_than_the_bound() -> None:
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


def test_joiner_starts_at_the_slowest_clock_however_it_counts() -> None:
    clocks = Clocks()
    clocks.follow(["a"])
    clocks.report("a", 0)
    clocks.report("a", 100)
    clocks.follow(["a", "fresh", "resumed"])
    clocks.report("fresh", 0)
    clocks.report("resumed", 5000)
    assert {member: each.clock for member, each in clocks.members.items()} == {
        "a": 100,
        "fresh": 100,
        "resumed": 100,
    }
    clocks.report("resumed", 5003)
    assert clocks.lead("resumed") == 3


def test_reassigned_member_takes_part_once_it_has_read() -> None:
    """A member that was placed at a new clock takes part once it has read. Until then, other
    servers may still place it, so its clock does not determine the place of other members."""
    clocks = Clocks()
    clocks.follow(["a"])
    clocks.arrive("a", 3)
    assert clocks.members["a"].takes_part
    clocks.report("a", 3, place=7)
    assert not clocks.members["a"].takes_part
    clocks.has_read("a", 3)
    assert clocks.members["a"].takes_part


def test_departed_member_stops_counting() -> None:
    clocks = Clocks()
    clocks.follow(["fast", "slow"])
    clocks.report("fast", 0)
    clocks.report("fast", 9)
    assert not clocks.may_proceed("fast", ssp(3))
    clocks.follow(["fast"])
    assert (clocks.slowest, clocks.may_proceed("fast", ssp(3))) == (9, True)


def test_repeated_report_does_not_move_a_clock_back() -> None:
    clocks = Clocks()
    clocks.follow(["a"])
    for finished in (0, 4, 2, 4):
        clocks.report("a", finished)
    assert clocks.slowest == 4


def test_largest_report_frees_all_others_permanently() -> None:
    clocks = Clocks()
    clocks.follow(["done", "a"])
    clocks.report("done", 0)
    clocks.report("done", 2**63 - 1)
    clocks.report("a", 0)
    clocks.report("a", 7)
    assert (clocks.slowest, clocks.may_proceed("a", ssp(0))) == (7, True)


def test_joiner_of_an_emptied_job_starts_at_the_last_slowest_clock() -> None:
    clocks = Clocks()
    clocks.follow(["a"])
    clocks.report("a", 0)
    clocks.report("a", 7)
    clocks.report("a", 2**63 - 1)
    clocks.follow(["a", "joiner"])
    assert clocks.members["joiner"].clock == 7


def test_resting_member_is_not_awaited_and_returns_at_the_clock_of_the_others() -> None:
    clocks = Clocks()
    clocks.follow(["resting", "a"])
    for member in ("resting", "a"):
        clocks.report(member, 0)
    clocks.rest("resting")
    clocks.report("a", 9)
    assert clocks.may_proceed("a", ssp(0))
    clocks.report("resting", 0)
    assert clocks.members["resting"].clock == 9
    clocks.report("a", 10)
    assert not clocks.may_proceed("a", ssp(0))


def test_too_large_numbers_are_no_error_and_mark_no_member_as_resting() -> None:
    clocks = Clocks()
    clocks.follow(["a", "b"])
    clocks.has_read("a", 2**63 - 1)
    assert clocks.arrive("b", 2**63 - 1) == 1
    assert not any(each.rests for each in clocks.members.values())


def test_bsp_admits_a_push_once_all_have_read_what_it_would_change() -> None:
    clocks = Clocks()
    clocks.follow(["a", "b"])
    for member in ("a", "b"):
        clocks.report(member, 0)
    clocks.has_read("a", 0)
    iteration = clocks.arrive("a", 1)
    assert clocks.awaited(iteration) == ["b"]
    clocks.has_read("b", 0)
    assert not clocks.awaited(iteration)


def test_bsp_member_that_pushes_counts_as_having_read() -> None:
    clocks = Clocks()
    clocks.follow(["a", "b"])
    first, second = clocks.arrive("a", 1001), clocks.arrive("b", 1)
    assert (first, second, clocks.awaited(first)) == (1, 1, [])


def test_bsp_second_push_of_an_iteration_finished_here_belongs_to_the_next() -> None:
    """Under bsp, the second push of a member in an iteration that this server has finished counts
    for the next iteration. This happens when another server has refused the first push."""
    clocks = Clocks()
    clocks.follow(["a", "b"])
    for member in ("a", "b"):
        clocks.open(clocks.arrive(member, 1))
        clocks.report(member, 1)
    assert clocks.arrive("a", 1) == 2
    assert clocks.awaited(2) == ["b"]


def test_bsp_joiner_starts_behind_the_open_iteration_and_is_then_awaited() -> None:
    clocks = Clocks()
    clocks.follow(["a", "b"])
    for member in ("a", "b"):
        clocks.open(clocks.arrive(member, 1))
    clocks.report("a", 1)
    clocks.follow(["a", "b", "joiner"])
    clocks.report("joiner", 0)
    assert clocks.members["joiner"].clock == 1
    assert not clocks.may_proceed("joiner", BSP)
    clocks.report("b", 1)
    assert all(clocks.may_proceed(member, BSP) for member in ("a", "b", "joiner"))
    for member in ("a", "b"):
        clocks.has_read(member, 1)
    assert clocks.awaited(clocks.arrive("a", 2)) == ["joiner"]


def test_member_is_placed_by_the_servers_count_on_request_and_never_further_back() -> None:
    clocks = Clocks()
    clocks.follow(["a", "b"])
    clocks.report("a", 100)
    clocks.report("a", 100, place=3)
    assert clocks.members["a"].clock == 3
    clocks.report("a", 101)
    assert clocks.members["a"].clock == 4
    clocks.report("a", 101, place=2)
    assert clocks.members["a"].clock == 4


def test_emptied_job_continues_where_it_was() -> None:
    clocks = Clocks()
    clocks.follow(["a"])
    clocks.report("a", 0)
    clocks.report("a", 7)
    clocks.follow([])
    clocks.follow(["b"])
    assert clocks.members["b"] == MemberClock(clock=7)


class StaleSynchronousParallel(RuleBasedStateMachine):
    """Members that do what ssp allows, joining and leaving at any time."""

    members = Bundle("members")

    def __init__(self) -> None:
        super().__init__()
        self.clocks = Clocks()
        self.consistency = ssp(2)
        self.iterations: dict[str, int] = {}
        """Number of finished iterations by member, as the member counts them."""
        self.begun: dict[str, int] = {}
        """Clock of each member when it last was allowed to proceed. It was then at most `bound`
        ahead."""
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
        """Pulls, which reports the clock. If allowed to proceed, the member finishes an
        iteration."""
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
        """A member begins an iteration at most `bound` ahead, so it ends it at most `bound` + 1
        ahead."""
        assert all(
            0 <= self.clocks.lead(member) <= self.consistency.bound + 1
            for member in self.iterations
        )

    @precondition(lambda self: self.iterations)
    @invariant()
    def some_member_can_always_continue(self) -> None:
        assert any(self.clocks.may_proceed(member, self.consistency) for member in self.iterations)

    @invariant()
    def the_slowest_clock_never_falls(self) -> None:
        assert self.clocks.slowest >= self.slowest_seen
        self.slowest_seen = self.clocks.slowest


TestStaleSynchronousParallel = StaleSynchronousParallel.TestCase
TestStaleSynchronousParallel.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)


class BulkSynchronousParallel(RuleBasedStateMachine):
    """Members that read, push and wait under bsp. They join, leave, rest and return at any time."""

    members = Bundle("members")

    def __init__(self) -> None:
        super().__init__()
        self.clocks = Clocks()
        self.finished: dict[str, int] = {}
        """Number of finished iterations by member, as the member counts them."""
        self.has_values: dict[str, bool] = {}
        self.admitted: list[int] = []
        """Iterations of the admitted pushes."""
        self.under_way: dict[str, int] = {}
        """Iteration of each member's push that was admitted and has not completely arrived."""
        self.values: dict[int, int] = {}
        """Number of pushes that are visible in the values read at each clock."""
        self.count = 0

    def _follow(self) -> None:
        self.clocks.follow(list(self.finished))

    @rule(target=members, start=st.integers(0, 10**6))
    def join(self, start: int) -> str:
        self.count += 1
        member = f"member-{self.count}"
        self.finished[member], self.has_values[member] = start, False
        self._follow()
        return member

    @rule(member=consumes(members))
    def leave(self, member: str) -> None:
        del self.finished[member]
        self.under_way.pop(member, None)
        self._follow()

    @precondition(lambda self: self.finished)
    @rule(member=members)
    def rest(self, member: str) -> None:
        if member not in self.under_way:
            self.clocks.rest(member)
            self.has_values[member] = False

    @rule(member=members)
    def pull(self, member: str) -> None:
        if member in self.under_way or self.has_values[member]:
            return
        self.clocks.report(member, self.finished[member])
        if not self.clocks.may_proceed(member, BSP):
            return
        clock = self.clocks.members[member].clock
        assert all(iteration <= clock for iteration in self.admitted), (
            "the member reads a push of a later iteration"
        )
        assert not self.under_way, "the member reads a partly applied push"
        assert self.values.setdefault(clock, len(self.admitted)) == len(self.admitted), (
            "others have read different values in this iteration"
        )
        self.clocks.has_read(member, self.finished[member])
        self.has_values[member] = True

    @rule(member=members)
    def push(self, member: str) -> None:
        if member in self.under_way or not self.has_values[member]:
            return
        iteration = self.clocks.arrive(member, self.finished[member] + 1)
        if self.clocks.awaited(iteration):
            return
        self.clocks.open(iteration)
        self.admitted.append(iteration)
        self.under_way[member] = iteration

    @rule(member=members)
    def end_push(self, member: str) -> None:
        if self.under_way.pop(member, None) is not None:
            self.finished[member] += 1
            self.clocks.report(member, self.finished[member])
            self.has_values[member] = False

    @rule(member=members, back=st.integers(0, 3))
    def repeat(self, member: str, back: int) -> None:
        """Repeats an earlier report."""
        if self.clocks.members[member].origin is not None:
            before = self.clocks.members[member]
            self.clocks.report(member, max(0, self.finished[member] - back))
            assert self.clocks.members[member] == before

    @precondition(lambda self: self.finished)
    @invariant()
    def some_member_can_always_continue(self) -> None:
        awake = [member for member in self.finished if not self.clocks.members[member].rests]
        free = [
            m
            for m in awake
            if m in self.under_way or (not self.has_values[m] and self.clocks.may_proceed(m, BSP))
        ]
        ready = [
            m
            for m in awake
            if self.has_values[m] and not self.clocks.awaited(self.clocks.members[m].clock + 1)
        ]
        assert not awake or free or ready


TestBulkSynchronousParallel = BulkSynchronousParallel.TestCase
TestBulkSynchronousParallel.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
