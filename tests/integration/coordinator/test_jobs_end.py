"""Ending the jobs of a coordinator, at any moment of what it says to Redis."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta

import pytest
from prometheus_client import CollectorRegistry
from shoal_common.errors import UnavailableError
from shoal_coordinator.membership.spec import Policy
from shoal_coordinator.metrics import CoordinatorMetrics
from shoal_coordinator.service import jobs as jobs_module
from shoal_coordinator.service.clock import Clock
from shoal_coordinator.service.jobs import Jobs
from shoal_coordinator.state.store import JobStore

_ROUNDS = 8


def test_jobs_end_at_any_moment_of_an_answer_from_redis(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancellation that meets Redis' answer is lost on the way, in Python 3.11: with one cancellation only, most of these rounds hang."""
    monkeypatch.setattr(jobs_module, "_EPOCH_CHECK_INTERVAL_S", 0.0)
    moments = random.Random(1)

    async def round_() -> None:
        store = await JobStore.open(redis_url)
        clock = Clock(await store.now_unix_ms())
        metrics = CoordinatorMetrics(CollectorRegistry())
        jobs = Jobs(store, clock=clock, policy=Policy(), metrics=metrics, retention=timedelta(days=1))
        await jobs.load()
        await asyncio.sleep(moments.uniform(0.001, 0.005))
        async with asyncio.timeout(30):
            await jobs.close(UnavailableError("this coordinator is stopping"))
        await store.close()

    for _ in range(_ROUNDS):
        asyncio.run(round_())
