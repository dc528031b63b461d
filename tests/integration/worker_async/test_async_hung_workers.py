"""A worker hangs in its own code while its heartbeats continue. The others wait for it at the end
of the epoch, or at their staleness bound. Then it is evicted, and they train its batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from shoal_worker.data.record import audit

from tests.integration.worker_async.async_cluster import AsyncCluster

Make = Callable[..., AsyncCluster]

AT_THE_END = {"consistency": "asp"}
AT_THE_BOUND = {"consistency": "ssp", "staleness_bound": 3}


@pytest.mark.parametrize(
    "options", [AT_THE_END, AT_THE_BOUND], ids=["at-the-end-of-the-epoch", "at-the-bound"]
)
def test_hung_worker_is_evicted_and_its_batches_are_trained_by_others(
    cluster: Make, options: dict[str, object]
) -> None:
    running = cluster(together=2, stall_timeout_ms=2000)
    hung = running.start_worker(epochs=1, hold_at=[3], options=options)
    other = running.start_worker(epochs=1, hold_at=[1], options=options)
    hung.wait_step(3)
    other.wait_step(1)
    other.go(1)
    assert other.result()["steps"] > 0
    endings = [
        event.attributes["ending"]
        for event in running.client.watch_events(running.job_id)
        if event.kind == "member_lost"
    ]
    assert endings == ["stalled"]
    hung.process.kill()
    report = audit(running.records)
    assert report.exactly_once
