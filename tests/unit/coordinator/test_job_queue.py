"""Requests that wait for a job's loop while Redis accepts no changes: their number is bounded, and
abandoned ones are dropped."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import cast

import pytest
from prometheus_client import CollectorRegistry
from shoal_common.errors import UnavailableError
from shoal_coordinator.membership.model.events import DrainRequested, StreamBroken
from shoal_coordinator.membership.model.spec import JobSpec, Policy
from shoal_coordinator.membership.model.state import RunId
from shoal_coordinator.membership.transition import Outcome, job_created
from shoal_coordinator.metrics import CoordinatorMetrics
from shoal_coordinator.service import job_loop
from shoal_coordinator.service.clock import Clock
from shoal_coordinator.service.job_loop import JobLoop
from shoal_coordinator.state.store import JobStore, Stored

DRAIN = DrainRequested(member_id=None, rank=0, reason="drained")


def stuck_loop() -> JobLoop:
    """Returns a loop that does not run, like one that is waiting for Redis."""
    return JobLoop(
        Stored(
            state=job_created(JobSpec(job_id="j", min_workers=1, max_workers=2), RunId()),
            revision=1,
        ),
        store=cast(JobStore, None),
        clock=Clock(0),
        policy=Policy(),
        metrics=CoordinatorMetrics(CollectorRegistry()),
    )


def test_requests_are_refused_when_too_many_are_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_loop, "_MOST_REQUESTS", 3)

    async def test() -> None:
        loop = stuck_loop()
        outcomes: list[Outcome] = []
        waiting = [loop.request(DRAIN, outcomes.append) for _ in range(3)]
        with pytest.raises(
            UnavailableError, match="job j has reached the limit of 3 requests waiting for Redis"
        ) as refusal:
            await loop.ask(DRAIN, timeout_s=60)
        assert refusal.value.reason == "QUEUE_LIMIT"
        assert refusal.value.retry_after == timedelta(seconds=1)
        # The coordinator's own observations are not requests.
        loop.submit(StreamBroken(member_id="a"))
        assert outcomes == []

        for submitted in waiting[:2]:
            loop.withdraw(submitted)
        assert [type(outcome) for outcome in outcomes] == [UnavailableError, UnavailableError]
        loop.request(DRAIN, outcomes.append)
        assert len(outcomes) == 2

    asyncio.run(test())


@pytest.mark.parametrize("keep", [False, True])
def test_requests_of_callers_that_gave_up_stay_queued_only_where_they_should(keep: bool) -> None:
    async def test() -> None:
        loop = stuck_loop()
        with pytest.raises(
            UnavailableError, match=r"Redis did not accept this change within 0\.01 s"
        ):
            await loop.ask(DRAIN, timeout_s=0.01, keep=keep)
        assert loop.is_idle is not keep

        loop = stuck_loop()
        cancelled = asyncio.create_task(loop.ask(DRAIN, timeout_s=60, keep=keep))
        await asyncio.sleep(0)
        assert not loop.is_idle
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert loop.is_idle is not keep

    asyncio.run(test())
