"""Waits on the fence and the clocks are woken by news and ended by deadlines."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from shoal_common.errors import DeadlineError, StaleGenerationError, UnavailableError
from shoal_ps_server.consistency.clocks import Clocks, Consistency, ConsistencyMode
from shoal_ps_server.consistency.fence import Fence
from shoal_ps_server.consistency.membership import Membership

LONG = timedelta(seconds=30)
SHORT = timedelta(milliseconds=20)


def membership(*, bound: int = 0, admission_wait: timedelta = LONG) -> Membership:
    made = Membership(fence=Fence(), clocks=Clocks(), admission_wait=admission_wait)
    made.consistency = Consistency(mode=ConsistencyMode.SSP, bound=bound)
    return made


def in_step(*members: str, push_wait: timedelta = LONG) -> Membership:
    """Returns a bsp membership in which all members but the last have read the first values."""
    made = Membership(fence=Fence(), clocks=Clocks(), push_wait=push_wait)
    made.consistency = Consistency(mode=ConsistencyMode.BSP)
    made.learn(1, members)
    for member in members[:-1]:
        made.has_read(member, 0)
    return made


async def settled(task: asyncio.Task[None]) -> None:
    """Runs the event loop until the task waits."""
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()


def test_member_waits_for_the_coordinators_confirmation_of_its_generation() -> None:
    async def scenario() -> None:
        members = membership()
        admitted = asyncio.create_task(members.admit("a", 1))
        await settled(admitted)
        members.learn(1, ["a"])
        await admitted

    asyncio.run(scenario())


def test_waiting_member_is_refused_when_its_generation_arrives_without_it() -> None:
    async def scenario() -> None:
        members = membership()
        admitted = asyncio.create_task(members.admit("a", 1))
        await settled(admitted)
        members.learn(1, ["b"])
        with pytest.raises(StaleGenerationError):
            await admitted

    asyncio.run(scenario())


def test_silent_coordinator_makes_the_caller_retry() -> None:
    async def scenario() -> None:
        with pytest.raises(UnavailableError) as caught:
            await membership(admission_wait=SHORT).admit("a", 3)
        assert caught.value.reason == "MEMBERSHIP_UNKNOWN"
        assert "generation 3" in str(caught.value)

    asyncio.run(scenario())


def test_fast_members_wait_until_slow_ones_have_caught_up() -> None:
    async def scenario() -> None:
        members = membership(bound=1)
        members.learn(1, ["fast", "slow"])
        for member in ("fast", "slow"):
            members.finished(member, 0)
        members.finished("fast", 2)
        turn = asyncio.create_task(members.proceed("fast", 1, wait=LONG))
        await settled(turn)
        members.finished("slow", 1)
        await turn

    asyncio.run(scenario())


def test_fast_members_continue_when_slow_ones_are_evicted() -> None:
    async def scenario() -> None:
        members = membership()
        members.learn(1, ["fast", "slow"])
        members.finished("fast", 0)
        members.finished("fast", 1)
        turn = asyncio.create_task(members.proceed("fast", 1, wait=LONG))
        await settled(turn)
        members.learn(2, ["fast"])
        await turn

    asyncio.run(scenario())


def test_wait_for_slow_members_ends_at_its_deadline_and_reports_the_gap() -> None:
    async def scenario() -> None:
        members = membership(bound=2)
        members.learn(1, ["fast", "slow"])
        members.finished("fast", 0)
        members.finished("fast", 5)
        with pytest.raises(DeadlineError, match=r"5 clocks ahead .* ssp allows only 2") as caught:
            await members.proceed("fast", 1, wait=SHORT)
        assert caught.value.reason == "SSP_WAIT_TIMEOUT"

    asyncio.run(scenario())


def test_a_member_evicted_while_it_waits_receives_the_reason() -> None:
    async def scenario() -> None:
        members = membership()
        members.learn(1, ["fast", "slow"])
        members.finished("fast", 0)
        members.finished("fast", 1)
        turn = asyncio.create_task(members.proceed("fast", 1, wait=LONG))
        await settled(turn)
        members.learn(2, ["slow"])
        with pytest.raises(StaleGenerationError):
            await turn

    asyncio.run(scenario())


def test_a_clock_of_a_member_just_evicted_is_ignored() -> None:
    members = membership()
    members.learn(1, ["a"])
    members.finished("gone", 3)
    assert set(members.clocks.members) == {"a"}


def test_bsp_push_is_admitted_when_the_last_member_has_read() -> None:
    async def scenario() -> None:
        members = in_step("a", "b")
        push = asyncio.create_task(members.let_in("a", 1, 1))
        await settled(push)
        members.has_read("b", 0)
        await push

    asyncio.run(scenario())


def test_bsp_push_is_admitted_when_the_last_member_sends_its_own() -> None:
    async def scenario() -> None:
        members = in_step("a", "b")
        push = asyncio.create_task(members.let_in("a", 1, 1))
        await settled(push)
        await members.let_in("b", 1, 1)
        await push

    asyncio.run(scenario())


def test_the_error_of_a_push_of_bsp_that_waits_too_long_names_the_slow_member() -> None:
    async def scenario() -> None:
        members = in_step("a", *(f"m{number}" for number in range(8)), push_wait=SHORT)
        members.clocks.follow(["a", *(f"new{number}" for number in range(7))])
        with pytest.raises(
            DeadlineError,
            match=r"waited 0\.02 s for 'new0', 'new1', 'new2', 'new3', 'new4' and 2 more; try "
            r"again",
        ) as caught:
            await members.let_in("a", 1, 1)
        assert caught.value.reason == "BSP_WAIT_TIMEOUT"

    asyncio.run(scenario())


def test_the_error_of_a_pull_of_bsp_that_waits_too_long_names_the_slow_member() -> None:
    async def scenario() -> None:
        members = in_step("a", "b")
        members.finished("a", 1)
        with pytest.raises(
            DeadlineError, match=r"bsp allows only 0; waited 0\.02 s for 'b'"
        ) as caught:
            await members.proceed("a", 1, wait=SHORT)
        assert caught.value.reason == "BSP_WAIT_TIMEOUT"

    asyncio.run(scenario())


def test_a_member_evicted_while_its_push_waits_receives_the_reason() -> None:
    async def scenario() -> None:
        members = in_step("a", "b")
        push = asyncio.create_task(members.let_in("a", 1, 1))
        await settled(push)
        members.learn(2, ["b"])
        with pytest.raises(StaleGenerationError):
            await push

    asyncio.run(scenario())


def test_waiting_pushes_are_asked_to_retry_when_the_server_stops() -> None:
    async def scenario() -> None:
        members = in_step("a", "b")
        push = asyncio.create_task(members.let_in("a", 1, 1))
        await settled(push)
        members.stop()
        with pytest.raises(UnavailableError) as caught:
            await push
        assert caught.value.reason == "SERVER_STOPPING"

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", [ConsistencyMode.SSP, ConsistencyMode.BSP])
def test_waiting_member_is_notified_when_its_partition_leaves(make, mode) -> None:
    async def test() -> None:
        membership = Membership(fence=Fence(), clocks=Clocks())
        membership.consistency = Consistency(mode=mode)
        membership.learn(1, "ab")
        shard = make.shard(make.spec(0), make.spec(1, offset=6))
        membership.finished("a", 0)
        membership.finished("a", 5)

        def check() -> None:
            shard.check_open(make.spec(1))

        waiting = [
            asyncio.create_task(membership.proceed("a", 1, wait=timedelta(minutes=9), check=check))
        ]
        if mode is ConsistencyMode.BSP:
            waiting.append(asyncio.create_task(membership.let_in("a", 1, 7, check=check)))
        await asyncio.sleep(0)
        shard.freeze({0})
        membership.wake()
        await asyncio.sleep(0.01)
        assert not any(each.done() for each in waiting)
        shard.freeze({1})
        membership.wake()
        for each in waiting:
            with pytest.raises(UnavailableError) as caught:
                await each
            assert caught.value.reason == "PARTITION_MOVING"

    asyncio.run(asyncio.wait_for(test(), 20))
