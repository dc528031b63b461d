from __future__ import annotations

import asyncio

import pytest
from shoal_common.tasks import end_tasks


def test_task_that_swallows_a_cancellation_is_cancelled_again() -> None:
    lost = 0

    async def rounds() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if lost == 2:
                    raise
                lost += 1

    async def test() -> None:
        task = asyncio.create_task(rounds())
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await end_tasks([task])
        assert task.cancelled()
        assert lost == 2

    asyncio.run(test())


def test_a_task_that_has_failed_keeps_its_error() -> None:
    async def failing() -> None:
        raise ValueError("broken")

    async def test() -> None:
        task = asyncio.create_task(failing())
        await asyncio.sleep(0)
        await end_tasks([task])
        with pytest.raises(ValueError, match="broken"):
            task.result()

    asyncio.run(test())


def test_ending_no_tasks_does_nothing() -> None:
    asyncio.run(end_tasks([]))
