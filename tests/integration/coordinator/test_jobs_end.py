"""A coordinator's jobs end at any moment of an exchange with Redis."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import redis.asyncio as redis
from prometheus_client import CollectorRegistry
from shoal_common.errors import InternalError, UnavailableError
from shoal_common.redis import EmbeddedRedis
from shoal_coordinator.membership.model.events import RunWanted, StopRequested
from shoal_coordinator.membership.model.reasons import Refusal
from shoal_coordinator.membership.model.spec import JobSpec, Policy
from shoal_coordinator.metrics import CoordinatorMetrics
from shoal_coordinator.service import jobs as jobs_module
from shoal_coordinator.service.clock import Clock
from shoal_coordinator.service.jobs import Jobs
from shoal_coordinator.state.store import JobStore

_ROUNDS = 8
_STOPPING = UnavailableError("this coordinator is stopping")
T = TypeVar("T")


def test_jobs_end_at_any_moment_of_an_answer_from_redis(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Python 3.11, a cancellation that coincides with Redis' answer is lost. With a single
    cancellation, most of these rounds hang."""
    monkeypatch.setattr(jobs_module, "_EPOCH_CHECK_INTERVAL_S", 0.0)
    moments = random.Random(1)

    async def round_() -> None:
        async with _jobs(redis_url) as jobs:
            await jobs.load()
            await asyncio.sleep(moments.uniform(0.001, 0.005))
            async with asyncio.timeout(30):
                await jobs.close(_STOPPING)

    for _ in range(_ROUNDS):
        asyncio.run(round_())


def test_waits_for_redis_end_at_once_when_the_coordinator_stops(
    own_redis: EmbeddedRedis,
) -> None:
    """One request is being committed, and one was queued meanwhile."""

    async def test() -> None:
        async with _jobs(own_redis.url) as jobs:
            await jobs.create(
                RunWanted(spec=JobSpec(job_id="job", min_workers=1, max_workers=1)), timeout_s=30
            )
            os.kill(own_redis.pid, signal.SIGSTOP)
            asked = [
                await _begun(jobs.get("job").ask(StopRequested(reason="a test"), timeout_s=600))
                for _ in range(2)
            ]
            async with asyncio.timeout(30):
                await jobs.close(_STOPPING)
                assert await asyncio.gather(*asked, return_exceptions=True) == [
                    _STOPPING,
                    _STOPPING,
                ]
            os.kill(own_redis.pid, signal.SIGCONT)

    asyncio.run(test())


def test_no_job_starts_in_a_stopping_coordinator(own_redis: EmbeddedRedis) -> None:
    async def test() -> None:
        async with _jobs(own_redis.url) as jobs:
            os.kill(own_redis.pid, signal.SIGSTOP)
            created = await _begun(
                jobs.create(
                    RunWanted(spec=JobSpec(job_id="job", min_workers=1, max_workers=1)),
                    timeout_s=600,
                )
            )
            await jobs.close(_STOPPING)
            os.kill(own_redis.pid, signal.SIGCONT)
            with pytest.raises(UnavailableError) as caught:
                await created
            assert caught.value.reason == Refusal.COORDINATOR_STOPPING
            assert jobs.states() == []

    asyncio.run(test())


def test_failing_coordinator_reports_that_it_stops_and_not_that_it_was_replaced(
    redis_url: str,
) -> None:
    """Another program has changed the job in Redis."""

    async def test() -> None:
        async with _jobs(redis_url) as jobs, redis.from_url(redis_url) as other:
            await jobs.create(
                RunWanted(spec=JobSpec(job_id="job", min_workers=1, max_workers=1)), timeout_s=30
            )
            (key,) = [
                key
                async for key in other.scan_iter(_type="hash")
                if await other.hexists(key, "revision")
            ]
            await other.hincrby(key, "revision", 5)
            loop = jobs.get("job")
            with pytest.raises(InternalError, match="at revision"):
                await loop.ask(StopRequested(reason="a test"), timeout_s=30)
            async with asyncio.timeout(30):
                assert isinstance(await jobs.failed, InternalError)
            assert loop.failure is not None
            assert loop.failure.reason == Refusal.COORDINATOR_STOPPING
            await jobs.close(_STOPPING)

    asyncio.run(test())


@asynccontextmanager
async def _jobs(redis_url: str) -> AsyncIterator[Jobs]:
    store = await JobStore.open(redis_url)
    metrics = CoordinatorMetrics(CollectorRegistry())
    yield Jobs(
        store,
        clock=Clock(await store.now_unix_ms()),
        policy=Policy(),
        metrics=metrics,
        retention=timedelta(days=1),
    )
    await store.close()


async def _begun(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Starts a call as a task and returns it once it waits for Redis."""
    task = asyncio.create_task(coroutine)
    for _ in range(20):
        await asyncio.sleep(0)
    return task
