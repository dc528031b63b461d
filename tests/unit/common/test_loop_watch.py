"""A blocked event loop logs what it executes, and its metrics count the time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from shoal_common.telemetry.http import serve_metrics
from shoal_common.telemetry.loop_watch import LoopWatch

from tests.zygote.children import eventually


def test_the_stack_of_a_blocked_loop_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def reports() -> list[str]:
        return [each for each in caplog.messages if "has been blocked for" in each]

    def hangs() -> None:
        eventually(reports, "the report of this blocked loop")

    async def serve() -> None:
        watch = LoopWatch("the service", CollectorRegistry(), after=timedelta(seconds=0.2))
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


def test_responsive_loop_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def serve() -> None:
        watch = LoopWatch("the service", CollectorRegistry(), after=timedelta(seconds=60))
        await asyncio.sleep(0)
        watch.close()

    asyncio.run(serve())
    assert not caplog.messages


def test_metrics_count_blocked_time_while_the_loop_is_blocked() -> None:
    registry = CollectorRegistry()

    def counted() -> float:
        with urlopen(f"http://{http.address}/metrics", timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return next(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "shoal_event_loop_blocked_seconds_total"
        )

    async def serve() -> None:
        began = time.monotonic()
        watch = LoopWatch("the service", registry, after=timedelta(seconds=0.2))
        eventually(lambda: counted() > 0.4, "a count that grows during the blocked call")
        meanwhile = counted()
        assert 0.4 < meanwhile <= time.monotonic() - began
        afterwards = await asyncio.to_thread(counted)
        assert meanwhile <= afterwards <= time.monotonic() - began
        watch.close()

    with serve_metrics("127.0.0.1:0", registry) as http:
        asyncio.run(serve())
