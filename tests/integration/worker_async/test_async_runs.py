"""A job id is used again with parameter servers that keep their data: the values found by a new
run, a resumed run and a lost run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shoal_protos.v1 import coordinator_pb2 as pb

from tests.integration.coordinator.harness import Coordinator
from tests.integration.worker_async.async_cluster import AsyncCluster, Server
from tests.zygote.children import Zygote, eventually

Make = Callable[..., AsyncCluster]


@pytest.fixture
def forgetful(zygote: Zygote, tmp_path: Path) -> Iterator[Coordinator]:
    """A coordinator whose Redis data is in tmp_path/valkey, where the test can delete it."""
    coordinator = Coordinator(
        zygote, tmp_path, "--redis", f"embedded://{tmp_path / 'valkey'}"
    ).start()
    yield coordinator
    coordinator.close()


def lose_redis(coordinator: Coordinator, tmp_path: Path) -> None:
    coordinator.terminate()
    shutil.rmtree(tmp_path / "valkey")
    coordinator.start()


def ended(servers: list[Server]) -> None:
    """Checks that the servers exit with status 0, as they do at the end of their run."""
    assert {server.process.wait() for server in servers} == {0}, [
        server.process.said() for server in servers
    ]


def fail_job(running: AsyncCluster) -> None:
    """Kills the worker and reports to the coordinator what its launcher reports if the script
    raises."""
    worker = running.workers[-1]
    (member,) = running.job().members
    worker.process.kill()
    worker.process.wait()
    running.client.report_exit(running.job_id, member.member_id, exit_code=1, failure="ValueError")


def test_new_run_starts_with_fresh_values_and_the_data_of_the_last_four_runs_is_kept_aside(
    cluster: Make,
) -> None:
    running = cluster()
    first = running.start_worker(epochs=1).result()
    for number in range(2, 7):
        ended(running.servers)
        for server in running.servers:
            # before anyone has begun the next run: under compose, workers wait for servers
            server.start()
        assert running.begin_run().run.number == number
        worker = running.start_worker(epochs=1).result()
        assert worker["first_parameters"] == first["first_parameters"] != worker["parameters"]
        assert worker["epochs"] == [0]
    assert running.job().run.number == 6
    ended(running.servers)
    for server in running.servers:
        assert {folder.name for folder in server.data.glob("run-*")} == {
            "run-2",
            "run-3",
            "run-4",
            "run-5",
        }
        assert (server.data / "run-5" / "snapshot.safetensors").exists()
        assert (server.data / "run").read_text().startswith("6:")


def test_runs_that_fail_before_training_keep_the_previous_runs_values(
    cluster: Make,
) -> None:
    running = cluster()
    running.start_worker(epochs=1).result()
    for number in (2, 3, 4, 5):
        ended(running.servers)
        for server in running.servers:
            server.start()
        assert running.begin_run().run.number == number
        eventually(
            lambda: [server.alive for server in running.job().servers] == [True, True],
            "the servers to be in the run",
        )
        running.client.stop_job(running.job_id)
    ended(running.servers)
    for server in running.servers:
        assert [folder.name for folder in server.data.glob("run-*")] == ["run-1"]
        assert (server.data / "run-1" / "snapshot.safetensors").exists()


def test_a_run_that_failed_is_resumed_with_its_servers_values_and_its_epoch(cluster: Make) -> None:
    running = cluster()
    worker = running.start_worker(epochs=2, hold_at=[40])  # in the second epoch
    worker.wait_step(40)
    held = [server.look().partitions for server in running.servers]
    fail_job(running)
    ended(running.servers)
    for server in running.servers:
        server.start()
    answer = running.begin_run(resume=True)
    assert (answer.run.number, answer.begun) == (1, True)
    resumed = running.start_worker(epochs=2, hold_at=[0])
    resumed.wait_step(0)
    assert [server.look().partitions for server in running.servers] == held
    resumed.go(0)
    assert resumed.result()["epochs"] == [1]


def test_resumed_run_reports_a_server_without_its_data(cluster: Make) -> None:
    running = cluster()
    worker = running.start_worker(epochs=2, hold_at=[40])
    worker.wait_step(40)
    assert "LOST" not in worker.process.said()
    fail_job(running)
    ended(running.servers)
    lost, kept = running.servers
    shutil.rmtree(lost.data)
    for server in (lost, kept):
        server.start()
    running.begin_run(resume=True)
    resumed = running.start_worker(epochs=2)
    assert resumed.result()["epochs"] == [1]
    assert (
        re.findall(
            r"server (\d+) had no values for (\d+) of its \2 partitions",
            resumed.process.said(),
        )
        != []
    )
    assert resumed.process.said().count("its progress in these partitions is LOST") == 1


def test_start_after_a_failure_is_a_new_run_without_traces_of_the_old_one(
    cluster: Make,
) -> None:
    running = cluster()
    worker = running.start_worker(epochs=2, hold_at=[40])
    worker.wait_step(40)
    fail_job(running)
    ended(running.servers)
    for server in running.servers:
        server.start()
    assert running.begin_run().run.number == 2
    assert running.job().past_runs[0].ending == pb.JOB_ENDING_FAILED
    result = running.start_worker(epochs=2).result()
    assert result["epochs"] == [0, 1]
    assert result["steps"] == 64


@pytest.mark.parametrize("restarted", [False, True])
def test_a_server_whose_run_redis_has_lost_sets_its_data_aside_and_serves_the_new_one(
    cluster: Make, forgetful: Coordinator, tmp_path: Path, restarted: bool
) -> None:
    running = cluster(coordinator=forgetful)
    first = running.start_worker(epochs=1, hold_at=[8])
    first.wait_step(8)
    first.process.kill()
    first.process.wait()
    if restarted:
        for server in running.servers:
            server.process.kill()
            server.process.wait()
    lose_redis(forgetful, tmp_path)
    assert running.begin_run().run.number == 1
    for server in running.servers if restarted else ():
        server.start()
    result = running.start_worker(epochs=1).result()
    assert result["steps"] == 32
    for server in running.servers:
        assert "set this server's state aside and started over" in server.process.said()
        assert (server.data / "run-1").is_dir()


def test_run_lost_by_redis_continues_with_its_servers_while_its_workers_live(
    cluster: Make, forgetful: Coordinator, tmp_path: Path
) -> None:
    """A launcher that has just started creates the job again first."""
    running = cluster(coordinator=forgetful)
    worker = running.start_worker(epochs=1, hold_at=[8])
    worker.wait_step(8)
    run, generation = running.job().run, running.job().generation.number
    lose_redis(forgetful, tmp_path)
    running.begin_run()
    eventually(
        lambda: running.job().run == run and len(running.job().members) == 1,
        "the worker to bring its run back",
    )
    eventually(
        lambda: [server.alive for server in running.job().servers] == [True, True],
        "the servers to come back to it",
    )
    assert running.job().generation.number > generation
    assert all(server.look().partitions for server in running.servers)
    assert not any(list(server.data.glob("run-*")) for server in running.servers)
