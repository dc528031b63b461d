"""A blocked event loop logs what it executes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from shoal_common.telemetry.loop_watch import LoopWatch

from tests.zygote.children import eventually


def test_the_stack_of_a_blocked_loop_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def reports() -> list[str]:
        return [each for each in caplog.messages if "has been blocked for" in each]

    def hangs() -> None:
        eventually(reports, "the report of this blocked loop")

    async def serve() -> None:
        watch = LoopWatch("the service", after=timedelta(seconds=0.2))
        hangs()
        await asyncio.to_thread(
            eventually, lambda: "was blocked, or its process stopped, for" in caplog.text, "the end"
        )
        watch.close()

    asyncio.run(serve())
    (report,) = reports()
    assert "the event loop of the service" in report
    assert "test_loop_watch.py" in report
    assert "in hangs\n" in report
    assert not [each for each in threading.enumerate() if each.name == "shoal-loop-watch"]


@pytest.fixture(autouse=True)
def _at_warning(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level("WARNING"):
        yield


def test_nothing_is_logged_of_a_loop_that_turns(caplog: pytest.LogCaptureFixture) -> None:
    async def serve() -> None:
        watch = LoopWatch("the service", after=timedelta(seconds=60))
        await asyncio.sleep(0)
        watch.close()

    asyncio.run(serve())
    assert not caplog.messages
