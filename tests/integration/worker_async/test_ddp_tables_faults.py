"""Sparse tables under ddp when servers lose their data, runs begin again, and ranks die or leave at
the end."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

from tests.integration.worker_async.async_cluster import AsyncCluster
from tests.integration.worker_async.test_async_runs import ended, fail_job
from tests.integration.worker_async.test_ddp_tables import STEPS, start

Make = Callable[..., AsyncCluster]


def snapshot_versions(running: AsyncCluster) -> dict[int, int]:
    found = {}
    for server in running.servers:
        server.process.wait()
        raw = (server.data / "snapshot.safetensors").read_bytes()
        head = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        found |= {
            each["partition_id"]: each["version"]
            for each in json.loads(head["__metadata__"]["shoal"])["partitions"]
        }
    return found


def test_servers_that_lose_their_data_are_named_and_training_continues(cluster: Make) -> None:
    running = cluster(together=2, keeps_data=False)
    workers = [start(running, hold_at=[5]), start(running)]
    workers[0].wait_step(5)
    server = running.servers[0]
    server.process.kill()
    server.process.wait()
    server.start()
    workers[0].go(5)
    for worker in workers:
        assert worker.result()["steps"] == STEPS
        assert "so its server has lost data" in worker.process.said()


def test_a_rank_without_batches_learns_that_a_server_has_lost_its_data(cluster: Make) -> None:
    running = cluster(together=3, keeps_data=False)
    workers = [start(running, hold_at=[5], global_batch=8, epochs=2) for _ in range(3)]
    for worker in workers:
        worker.wait_step(5)
    server = running.servers[0]
    server.process.kill()
    server.process.wait()
    server.start()
    for worker in workers:
        worker.go(5)
    for worker in workers:
        assert worker.result()["steps"] == 24


def test_rows_of_the_last_step_are_pushed_although_the_responsible_rank_dies(cluster: Make) -> None:
    running = cluster(together=2, min_workers=1, servers=1)
    workers = [
        start(running, looks=False),
        start(running, looks=False, failpoints=f"tables.met@{STEPS}=kill"),
    ]
    assert workers[1].process.wait() == -signal.SIGKILL
    assert workers[0].result()["steps"] == STEPS
    assert "not pushed" not in workers[0].process.said()
    assert set(snapshot_versions(running).values()) == {STEPS + 1}


def test_resumed_failed_run_trains_its_servers_rows(cluster: Make, tmp_path: Path) -> None:
    running = cluster(servers=1)
    checkpoint = str(tmp_path / "checkpoints")
    # beyond its last checkpoint
    start(running, hold_at=[21], save=checkpoint, save_until=2).wait_step(21)
    fail_job(running)
    ended(running.servers)
    running.servers[0].start()
    assert running.begin_run(resume=True).run.number == 1
    again = start(running, looks=False, resume=checkpoint)
    again.result()
    assert "has lost data" not in again.process.said()


def test_the_first_step_after_a_resume_is_pushed_although_it_is_lost_once(
    cluster: Make, tmp_path: Path
) -> None:
    running = cluster(together=2, min_workers=1)
    checkpoint = str(tmp_path / "checkpoints")
    first = [start(running, save=checkpoint, save_until=2, hold_at=[17]) for _ in range(2)]
    for worker in first:
        worker.wait_step(17)
    for worker in first:
        worker.process.kill()
    for worker in first:
        worker.process.wait()
    again = [
        start(running, resume=checkpoint),
        start(running, resume=checkpoint, failpoints="tables.summed@1=kill"),
    ]
    again[0].result()
    assert "has lost data" not in again[0].process.said()


def test_ranks_without_samples_and_short_steps_end_with_the_rows_of_one_process(
    cluster: Make, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    alone = start(cluster(directory=tmp_path / "alone", servers=1), global_batch=20).result()
    (tmp_path / "six").mkdir()
    six = cluster(directory=tmp_path / "six", together=6)
    for worker in [start(six, global_batch=20) for _ in range(6)]:
        assert worker.result()["digest"] == alone["digest"]
