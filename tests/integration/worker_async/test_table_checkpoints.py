"""Checkpoints contain the rows of sparse tables. Under ddp they equal those of the step bit for
bit, even if ranks die, for any number of ranks, servers and buckets."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.coordinator.harness import Coordinator
from tests.integration.worker_async.async_cluster import AsyncCluster, Server, Worker, async_cluster
from tests.integration.worker_async.test_ddp_tables import STEPS, start
from tests.zygote.children import Zygote, eventually

Make = Callable[..., AsyncCluster]
LIMITS = {"max_rows": 30, "max_age": 6, "buckets": 3}
"""Limits of the table of users. Both of them evict rows every few steps."""


def ended(workers: list[Worker]) -> list[dict[str, Any]]:
    results = [worker.result() for worker in workers]
    for worker, result in zip(workers, results, strict=True):
        assert result["steps"] == STEPS
        assert "has lost data" not in worker.process.said()
    return results


def is_stopped(worker: Worker) -> bool:
    """Returns whether the worker is stopped by SIGSTOP."""
    assert not worker.process.ended.is_set(), worker.process.said()
    return Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def newest(directory: Path) -> int:
    return max(
        (int(path.name.removeprefix("step-")) for path in directory.glob("step-*")), default=0
    )


@pytest.fixture(scope="module")
def fault_free(
    zygote: Zygote, coordinator: Coordinator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """The final state of a run of one worker without limits."""
    with async_cluster(zygote, coordinator, tmp_path_factory.mktemp("alone"), servers=1) as running:
        yield ended([start(running)])[0]


@pytest.fixture
def elsewhere(
    zygote: Zygote, coordinator: Coordinator, tmp_path: Path, cluster: Make
) -> Callable[..., AsyncCluster]:
    """elsewhere(**settings) -> another cluster, whose servers have no data."""

    def make(**settings: Any) -> AsyncCluster:
        directory = tmp_path / f"cluster-{len(list(tmp_path.glob('cluster-*')))}"
        directory.mkdir()
        return cluster(directory=directory, **settings)

    return make


def test_run_resumes_bit_for_bit_on_a_different_number_of_fresh_servers(
    elsewhere: Make, fault_free: dict[str, Any], tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    first = elsewhere(servers=2, together=2)
    for worker in [
        start(first, epochs=2, save=str(saved)),
        start(first, epochs=2, save=str(saved)),
    ]:
        worker.result()
    first.close()
    assert len(list((saved / "step-12").glob("rows-users-*-of-00003.safetensors"))) == 3
    second = elsewhere(servers=3, together=1)
    (result,) = ended([start(second, resume=str(saved))])
    assert result["digest"] == fault_free["digest"]


@pytest.mark.slow
def test_counts_and_ages_for_eviction_are_in_the_checkpoint(
    elsewhere: Make, fault_free: dict[str, Any], tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    (through,) = ended([start(elsewhere(servers=1), users=LIMITS)])
    assert through["digest"] != fault_free["digest"]
    start(elsewhere(servers=2), users=LIMITS, epochs=2, save=saved).result()
    (resumed,) = ended([start(elsewhere(servers=1), users=LIMITS, resume=saved)])
    assert resumed["digest"] == through["digest"]


@pytest.mark.parametrize(
    "buckets",
    [
        pytest.param(1, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.matrix) for n in (6, 7)),
    ],
)
def test_number_of_buckets_may_change_between_runs(
    elsewhere: Make, fault_free: dict[str, Any], tmp_path: Path, buckets: int
) -> None:
    saved = str(tmp_path / "saved")
    start(elsewhere(servers=1), epochs=2, save=saved).result()
    (result,) = ended([start(elsewhere(servers=2), users={"buckets": buckets}, resume=saved)])
    assert result["digest"] == fault_free["digest"]


def test_servers_that_ran_beyond_the_checkpoint_go_back_to_it(
    cluster: Make, fault_free: dict[str, Any], tmp_path: Path
) -> None:
    """All workers die and the servers keep running. The next workers find rows that are newer than
    their checkpoint."""
    saved = tmp_path / "saved"
    running = cluster(servers=2)
    victim = start(running, save=str(saved), hold_at=[16])
    eventually((victim.directory / "step-16").exists, f"step 16: {victim.process.said()}")
    assert {each.version for server in running.servers for each in server.look().partitions} == {17}
    victim.process.kill()
    victim.process.wait()
    again = start(running, resume=str(saved), hold_at=[12])
    eventually((again.directory / "step-12").exists, f"step 12: {again.process.said()}")
    assert {each.version for server in running.servers for each in server.look().partitions} == {13}
    (again.directory / "go-12").touch()
    assert ended([again])[0]["digest"] == fault_free["digest"]


@pytest.mark.slow
def test_rank_that_dies_while_rows_are_saved_loses_none(
    cluster: Make, fault_free: dict[str, Any], tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    running = cluster(together=3, min_workers=1)
    options = {"save": str(saved), "save_every": 4}
    workers = [
        start(running, **options),
        start(running, failpoints="rows.written@4=kill", **options),
        start(running, **options),
    ]
    assert workers[1].process.wait() == -signal.SIGKILL
    for result in ended([workers[0], workers[2]]):
        assert result["digest"] == fault_free["digest"]
    assert newest(saved) == STEPS
    assert not list(saved.glob(".step-*"))


@pytest.mark.parametrize(
    "hit", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.matrix)]
)
def test_rank_that_dies_while_rows_are_restored_loses_none(
    elsewhere: Make, fault_free: dict[str, Any], tmp_path: Path, hit: int
) -> None:
    saved = str(tmp_path / "saved")
    start(elsewhere(servers=1), epochs=2, save=saved).result()
    running = elsewhere(servers=2, together=2, min_workers=1)
    workers = [
        start(running, resume=saved),
        start(running, resume=saved, failpoints=f"rows.put@{hit}=kill"),
    ]
    assert workers[1].process.wait() == -signal.SIGKILL
    assert ended(workers[:1])[0]["digest"] == fault_free["digest"]


@pytest.mark.slow
def test_servers_killed_while_rows_are_saved_and_restored_lose_none(
    elsewhere: Make, fault_free: dict[str, Any], tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    first, second = elsewhere(servers=2), elsewhere(servers=2)

    def strike(running: AsyncCluster, worker: Worker) -> None:
        eventually(lambda: is_stopped(worker), "the worker to be in the middle of it")
        for server in running.servers:
            server.process.kill()
            server.process.wait()
            server.start()
        worker.process.kill(signal.SIGCONT)

    saving = start(first, epochs=2, save=str(saved), failpoints="rows.written@7=stop")
    strike(first, saving)
    saving.result()
    assert newest(saved) == 12
    resuming = start(second, resume=str(saved), failpoints="rows.put@3=stop")
    strike(second, resuming)
    assert ended([resuming])[0]["digest"] == fault_free["digest"]


@pytest.mark.slow
def test_restored_rows_are_on_backups(
    elsewhere: Make, fault_free: dict[str, Any], tmp_path: Path
) -> None:
    """The backup receives one bucket completely, and the others as changes. Then it takes over as
    the primary and gets a backup itself."""
    saved = str(tmp_path / "saved")
    start(elsewhere(servers=1), epochs=2, save=saved).result()
    running = elsewhere(servers=1, backups=1)
    first, second = running.servers
    worker = start(running, resume=saved, hold_at=[13, 18], failpoints="rows.put@1=stop")
    eventually(lambda: is_stopped(worker), "the first bucket to be in its place")
    in_sync(running)
    worker.process.kill(signal.SIGCONT)
    eventually((worker.directory / "step-13").exists, f"step 13: {worker.process.said()}")
    fail_over(running, first)
    worker.go(13)
    eventually((worker.directory / "step-18").exists, f"step 18: {worker.process.said()}")
    first.start()
    in_sync(running)
    fail_over(running, second)
    worker.go(18)
    assert ended([worker])[0]["digest"] == fault_free["digest"]


def in_sync(running: AsyncCluster) -> None:
    eventually(
        lambda: any(server.in_sync for server in running.job().servers), "the backup to be in sync"
    )


def fail_over(running: AsyncCluster, primary: Server) -> None:
    primary.process.kill()
    primary.process.wait()
    eventually(
        lambda: not any(server.in_sync for server in running.job().servers),
        "the backup to take over",
    )


@pytest.mark.slow
def test_restored_buckets_can_move(
    elsewhere: Make, fault_free: dict[str, Any], tmp_path: Path
) -> None:
    """The buckets move to a server that joins, which is then killed."""
    saved = str(tmp_path / "saved")
    start(elsewhere(servers=1), epochs=2, save=saved).result()
    running = elsewhere(servers=1, max_servers=2)
    worker = start(running, resume=saved, hold_at=[14, 18])
    eventually((worker.directory / "step-14").exists, f"step 14: {worker.process.said()}")
    before = {each.partition_id: each for each in running.servers[0].look().partitions}
    moved = running.start_server()
    eventually(lambda: len(moved.look().partitions) >= 2, "the new server's buckets")
    worker.go(14)
    eventually((worker.directory / "step-18").exists, f"step 18: {worker.process.said()}")
    moved.process.kill()
    moved.process.wait()
    moved.start()
    held = eventually(moved.looks, "the new server to be back")
    assert {each.restoration for each in held.partitions} == {before[0].restoration}
    worker.go(18)
    assert ended([worker])[0]["digest"] == fault_free["digest"]


def test_rows_come_from_the_checkpoint_read_by_the_first_rank(
    elsewhere: Make, fault_free: dict[str, Any], tmp_path: Path
) -> None:
    """Each machine has its own disk. The checkpoints on these disks have the same step but come
    from two different runs."""
    machines = [tmp_path / "machine-0", tmp_path / "machine-1"]
    for machine, changes in zip(machines, ({}, {"nan_at": [3]}), strict=True):
        machine.mkdir()
        start(
            elsewhere(servers=1), epochs=2, save="saved", machine=str(machine), **changes
        ).result()
    assert [newest(machine / "saved") for machine in machines] == [12, 12]
    running = elsewhere(servers=1, together=2)
    for result in ended(
        [start(running, resume="saved", machine=str(machine)) for machine in machines]
    ):
        assert result["digest"] == fault_free["digest"]


def test_a_damaged_file_of_rows_is_refused_and_nothing_is_changed(
    elsewhere: Make, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    first = elsewhere(servers=1)
    start(first, epochs=1, save=str(saved)).result()
    file = saved / "step-6" / "rows-words-00002-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    second = elsewhere(servers=1)
    damaged = start(second, resume=str(saved))
    assert damaged.process.wait() != 0
    assert f"{file.name} does not match its digest" in damaged.process.said()
    assert {each.version for each in second.servers[0].look().partitions} == {1}
    os.truncate(file, 10)
    short = start(second, resume=str(saved))
    assert short.process.wait() != 0
    assert f"{file.name} has 10 bytes" in short.process.said()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("users", "said"),
    [
        ({"seed": 5}, "table 'users' with seed=0, but the model declares 5"),
        (
            {"optimizer": "sparse_adam"},
            "rows of table 'users' with optimizer state of adagrad, but the model declares "
            "sparse_adam",
        ),
    ],
)
def test_a_table_of_another_kind_is_refused(
    elsewhere: Make, tmp_path: Path, users: dict[str, Any], said: str
) -> None:
    saved = str(tmp_path / "saved")
    start(elsewhere(servers=1), epochs=1, save=saved).result()
    other = start(elsewhere(servers=1), users=users, resume=saved)
    assert other.process.wait() != 0
    assert said in other.process.said()
