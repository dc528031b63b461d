"""A job's event loop with a real Valkey: many events share few commits."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

from prometheus_client import CollectorRegistry
from shoal_common.errors import UnavailableError
from shoal_coordinator.membership.model.events import MemberJoined, MemberReady, RunWanted
from shoal_coordinator.membership.model.spec import JobSpec, Policy
from shoal_coordinator.membership.model.state import Identity
from shoal_coordinator.metrics import CoordinatorMetrics
from shoal_coordinator.service.clock import Clock
from shoal_coordinator.service.jobs import Jobs
from shoal_coordinator.state.store import JobStore

MEMBERS = 1000


def identity(number: int) -> Identity:
    return Identity(
        member_id=f"m{number}",
        host=f"h{number // 8}",
        pid=1,
        launcher_id="",
        local_index=number % 8,
        donor_address="",
        metrics_address="",
    )


def test_thousand_simultaneous_joins_become_one_generation_in_a_few_commits(redis_url: str) -> None:
    registry = CollectorRegistry()

    async def test() -> None:
        store = await JobStore.open(redis_url)
        clock = Clock(await store.now_unix_ms())
        jobs = Jobs(
            store,
            clock=clock,
            policy=Policy(),
            metrics=CoordinatorMetrics(registry),
            retention=timedelta(days=1),
        )
        await jobs.load()
        await jobs.create(
            RunWanted(spec=JobSpec(job_id="j", min_workers=MEMBERS, max_workers=MEMBERS)),
            timeout_s=10,
        )
        loop = jobs.get("j")
        for number in range(MEMBERS):
            loop.submit(MemberJoined(identity=identity(number), last_generation=0))
        await asyncio.gather(
            *[
                loop.ask(MemberReady(member_id=f"m{number}"), timeout_s=30)
                for number in range(MEMBERS)
            ]
        )
        generation = loop.state.generation
        assert generation is not None
        assert generation.number == 1
        assert [rank.host for rank in generation.ranks] == [
            f"h{number // 8}" for number in range(MEMBERS)
        ]
        (stored,) = await store.load_all()
        assert stored.state.generation == generation
        await jobs.close(UnavailableError("the test is over"))
        await store.close()

    started = time.monotonic()
    asyncio.run(asyncio.wait_for(test(), 60))
    assert time.monotonic() - started < 60
    assert registry.get_sample_value("shoal_coordinator_events_per_commit_sum") == 2 * MEMBERS
    commits = registry.get_sample_value("shoal_coordinator_commit_seconds_count")
    assert commits is not None
    assert commits <= 3
