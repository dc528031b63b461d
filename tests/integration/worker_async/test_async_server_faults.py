"""Parameter servers that fail and come back with all of their data, part of it, or none."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shoal_common.exit_status import EVICTED
from shoal_worker.data.record import audit

from tests.integration.coordinator.harness import Coordinator
from tests.integration.worker_async.async_cluster import AsyncCluster, Server
from tests.integration.worker_async.train import SAMPLES
from tests.zygote.children import Zygote, eventually

Make = Callable[..., AsyncCluster]

BATCHES = SAMPLES // 8


def versions(server: Server) -> set[int]:
    found = {partition.version for partition in server.look().partitions}
    assert found, "the server holds nothing"
    return found


def test_server_restarted_from_its_snapshot_has_applied_every_push_once(
    cluster: Make,
) -> None:
    running = cluster()
    worker = running.start_worker(
        epochs=1, hold_at=[5, 12], optimizer="AdamW", settings={"lr": 0.05}
    )
    worker.wait_step(5)
    restarted, other = running.servers
    restarted.process.kill(signal.SIGTERM)
    assert restarted.process.wait() == 0
    worker.go(5)
    eventually(lambda: "will be retried" in worker.process.said(), "the worker to miss it")
    assert not worker.reached(6)
    restarted.start()
    worker.wait_step(12)
    assert versions(restarted) == versions(other) == {1 + 12}
    worker.go(12)
    assert worker.result()["steps"] == BATCHES
    assert "lost" not in worker.process.said()


@pytest.mark.parametrize(
    "options", [{}, {"delay_compensation": 0.04, "pull_every": 2}], ids=["plain", "compensated"]
)
def test_killed_server_returns_with_every_push_it_acknowledged(
    cluster: Make, options: dict[str, Any]
) -> None:
    running = cluster()
    worker = running.start_worker(
        epochs=2, hold_at=[4, 8, 12], optimizer="AdamW", settings={"lr": 0.05}, options=options
    )
    killed, other = running.servers
    for hold in (4, 8):
        worker.wait_step(hold)
        killed.process.kill()
        killed.process.wait()
        killed.start()
        worker.go(hold)
    worker.wait_step(12)
    assert versions(killed) == versions(other) == {1 + 12}
    worker.go(12)
    assert worker.result()["error"] < 1.0
    assert "restarted without" not in worker.process.said()


def test_a_server_continues_from_an_older_copy_of_its_data_and_the_worker_reports_the_loss(
    cluster: Make, tmp_path: Path
) -> None:
    running = cluster()
    worker = running.start_worker(epochs=2, hold_at=[4, 8, 12])
    worker.wait_step(4)
    set_back, other = running.servers
    shutil.copytree(set_back.data, tmp_path / "copy")
    worker.go(4)
    worker.wait_step(8)
    set_back.process.kill()
    set_back.process.wait()
    shutil.rmtree(set_back.data)
    shutil.copytree(tmp_path / "copy", set_back.data)
    set_back.start()
    worker.go(8)
    worker.wait_step(12)
    assert versions(set_back) == {1 + 4 + 4}
    assert versions(other) == {1 + 12}
    lost = 4 * len(set_back.look().partitions)
    worker.go(12)
    assert worker.result()["error"] < 1.0
    assert (
        f"restarted without {lost} updates of this worker that it had acknowledged"
        in worker.process.said()
    )


def test_server_that_returns_empty_receives_a_workers_values_and_the_schedule(
    cluster: Make,
) -> None:
    running = cluster(keeps_data=False, together=2)
    workers = [
        running.start_worker(epochs=4, hold_at=[6], gamma=0.99, schedule="iterations")
        for _ in range(2)
    ]
    for worker in workers:
        worker.wait_step(6)
    emptied, _ = running.servers
    emptied.process.kill()
    emptied.process.wait()
    emptied.start()
    for worker in workers:
        worker.go(6)
    assert max(worker.result()["error"] for worker in workers) < 0.5
    assert any("restarted without values" in worker.process.said() for worker in workers)
    assert audit(running.records).exactly_once


def test_a_server_that_stays_away_ends_the_step_with_one_clear_error(cluster: Make) -> None:
    running = cluster(servers=1)
    worker = running.start_worker(epochs=1, hold_at=[2], options={"server_timeout_s": 0.3})
    worker.wait_step(2)
    running.servers[0].process.kill()
    running.servers[0].process.wait()
    worker.go(2)
    assert worker.process.wait() == EVICTED  # not because of the script's error
    assert "parameter server 0" in worker.process.said()
    assert (
        "was unreachable for more than 0 s (server_timeout). Start it again with its data directory"
        in worker.process.said()
    )


def test_leases_survive_a_restart_of_the_coordinator(
    cluster: Make, zygote: Zygote, tmp_path: Path
) -> None:
    coordinator = Coordinator(
        zygote, tmp_path, "--redis", f"embedded://{tmp_path / 'valkey'}"
    ).start()
    try:
        running = cluster(coordinator=coordinator, together=2)
        workers = [running.start_worker(epochs=2, hold_at=[4]) for _ in range(2)]
        for worker in workers:
            worker.wait_step(4)
        coordinator.terminate()
        for worker in workers:
            worker.go(4)
        coordinator.start()
        assert sum(worker.result()["steps"] for worker in workers) == 2 * BATCHES
        assert audit(running.records).exactly_once
    finally:
        coordinator.close()


def test_a_checkpoint_has_the_servers_values_and_a_new_job_starts_from_it(
    cluster: Make, tmp_path: Path
) -> None:
    first_directory, second_directory = tmp_path / "first", tmp_path / "second"
    for directory in (first_directory, second_directory):
        directory.mkdir()
    running = cluster(directory=first_directory)
    saved = running.start_worker(
        epochs=1, gamma=0.5, schedule="epochs", save=str(tmp_path / "checkpoints")
    ).result()
    assert all(
        (first_directory / f"server-{index}" / "data" / "snapshot.safetensors").exists()
        for index in range(2)
    )

    resumed = cluster(directory=second_directory)
    worker = resumed.start_worker(
        seed=5,
        epochs=2,
        gamma=0.5,
        schedule="epochs",
        resume=str(tmp_path / "checkpoints"),
        hold_at=[1],
    )
    worker.wait_step(1)
    assert [
        server.look().optimizer.hyperparameters["lr"] for server in resumed.servers
    ] == pytest.approx([0.025] * 2)
    worker.go(1)
    result = worker.result()
    assert result["first_parameters"] == saved["parameters"]
    assert result["epochs"] == [1]
