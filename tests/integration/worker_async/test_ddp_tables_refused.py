"""Sparse tables under ddp: batches that servers would refuse, and ranks that are asked to leave."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.integration.worker_async.async_cluster import AsyncCluster
from tests.integration.worker_async.test_ddp_tables import STEPS, start
from tests.integration.worker_async.test_ddp_tables_faults import snapshot_versions
from tests.integration.worker_async.test_table_checkpoints import is_stopped
from tests.zygote.children import eventually

Make = Callable[..., AsyncCluster]


@pytest.mark.parametrize("micro", [True, False])
def test_batch_with_non_finite_gradients_is_skipped_as_the_error_says(
    cluster: Make, micro: bool
) -> None:
    running = cluster(together=1)
    worker = start(running, nan_at=[5], micro=micro)
    assert worker.result()["steps"] == STEPS


def test_drained_rank_pushes_its_rows_and_delays_nobody(cluster: Make) -> None:
    running = cluster(together=2)
    workers = [start(running, delay_s=0.05, patience_s=40.0) for _ in range(2)]
    workers[0].wait_step(8)
    leaving = next(
        each.member_id for each in running.job().members if each.member_id.startswith("member-1")
    )
    running.client.drain_member(running.job_id, member_id=leaving, reason="test")
    assert workers[1].process.wait() == 0, workers[1].process.said()
    assert workers[0].result()["steps"] == STEPS
    assert "not pushed" not in workers[1].process.said()
    assert "did not push them within" not in workers[0].process.said()


@pytest.mark.parametrize("step", [pytest.param(9, id="steps"), pytest.param(6, id="evaluate")])
def test_peers_push_the_share_of_a_rank_that_servers_refuse_later(cluster: Make, step: int) -> None:
    """The leaving rank 0 is stopped before its push until servers refuse it. By then rank 1 has
    pushed only its own share. It waits in the next step, or in `evaluate`, where only rank 0 has a
    batch and needs rows."""
    running = cluster(together=2)
    config = {"patience_s": 60.0, "validated": 4}
    leaver = start(running, failpoints=f"tables.met@{step}=stop", **config)
    eventually(lambda: running.job().members, "the member that becomes rank 0")
    other = start(running, **config)
    eventually(lambda: is_stopped(leaver), "the leaving rank to stop")
    leaving = running.job().generation.ranks[0].member_id
    assert leaving.startswith("member-0")
    running.client.drain_member(running.job_id, member_id=leaving, reason="test")
    eventually(
        lambda: all(each.member_id != leaving for each in running.job().generation.ranks),
        "a generation without the leaving rank",
    )
    leaver.process.kill(signal.SIGCONT)
    assert leaver.process.wait() == 0, leaver.process.said()
    assert other.result()["steps"] == STEPS
    assert "servers no longer accept rows from this rank" in leaver.process.said()


def test_drained_single_rank_pushes_its_last_step(cluster: Make) -> None:
    running = cluster(together=1, servers=1)
    worker = start(running, delay_s=0.05)
    worker.wait_step(8)
    running.client.drain_member(
        running.job_id, member_id=running.job().members[0].member_id, reason="test"
    )
    worker.process.wait()
    assert "pushed" not in worker.process.said()
    running.servers[0].process.kill(signal.SIGTERM)
    steps = len(list(worker.directory.glob("step-*")))
    assert set(snapshot_versions(running).values()) == {steps + 1}
