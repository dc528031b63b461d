"""Parameter servers with backups: a backup takes over at once from a lost primary, and no
acknowledged push is lost."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from shoal.parameter_servers import ModelReader
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2
from shoal_worker.data.record import audit

from tests.integration.coordinator.harness import Coordinator
from tests.integration.worker_async.async_cluster import AsyncCluster, Server, Worker, async_cluster
from tests.integration.worker_async.test_async_server_faults import BATCHES, versions
from tests.zygote.children import Zygote, eventually

Make = Callable[..., AsyncCluster]

PRIMARY, BACKUP = coordinator_pb2.SERVER_ROLE_PRIMARY, coordinator_pb2.SERVER_ROLE_BACKUP
ADAM = {"optimizer": "AdamW", "settings": {"lr": 0.05}}


class Pair:
    """The two servers of a job with one parameter server and a backup."""

    def __init__(self, running: AsyncCluster) -> None:
        self._running = running

    def status(self, role: int) -> coordinator_pb2.ServerStatus:
        (found,) = (each for each in self._running.job().servers if each.role == role)
        return found

    def process(self, role: int) -> Server:
        return self._running.servers[int(self.status(role).server_id.removeprefix("server-"))]

    def wait_in_sync(self) -> None:
        eventually(
            lambda: self.status(BACKUP).alive and self.status(BACKUP).in_sync,
            "a backup that is in sync",
        )

    def wait_replaced(self, before: coordinator_pb2.ServerStatus) -> None:
        eventually(lambda: self.status(PRIMARY).server_id != before.server_id, "another primary")


@pytest.fixture(scope="module")
def alone(
    zygote: Zygote, coordinator: Coordinator, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The final state of a run of one worker without faults. Its pushes are sequential, so every
    such run ends with the same parameters."""
    with async_cluster(zygote, coordinator, tmp_path_factory.mktemp("alone"), servers=1) as running:
        return running.start_worker(epochs=2, **ADAM).result()


def check_ended_alike(running: AsyncCluster, worker: Worker, expected: dict[str, Any]) -> None:
    result = worker.result()
    assert result["steps"] == 2 * BATCHES
    assert result["parameters"] == expected["parameters"]
    assert "restarted without" not in worker.process.said()
    assert audit(running.records).exactly_once


def test_killed_primary_is_replaced_by_its_backup_and_nothing_is_lost(
    cluster: Make, alone: dict[str, Any]
) -> None:
    running = cluster(servers=1, backups=1)
    pair = Pair(running)
    worker = running.start_worker(epochs=2, hold_at=[4, 8, 12], **ADAM)
    for hold in (4, 8):
        worker.wait_step(hold)
        pair.wait_in_sync()
        before, killed = pair.status(PRIMARY), pair.process(PRIMARY)
        killed.process.kill()
        killed.process.wait()
        worker.go(hold)
        pair.wait_replaced(before)
        killed.start()  # it comes back as the backup
    worker.wait_step(12)
    assert versions(pair.process(PRIMARY)) == {1 + 12}
    worker.go(12)
    check_ended_alike(running, worker, alone)


def test_worker_without_a_batch_says_so_to_the_server_that_took_over(
    cluster: Make, alone: dict[str, Any]
) -> None:
    running = cluster(servers=1, backups=1)
    pair = Pair(running)
    # This is the last batch of the epoch; the worker reports next that it is idle.
    stops = {"SHOAL_FAILPOINTS": f"exchange.done@{BATCHES}=stop"}
    worker = running.start_worker(
        epochs=2, hold_at=[4], options={"consistency": "bsp"}, environment=stops, **ADAM
    )
    worker.wait_step(4)
    pair.wait_in_sync()
    worker.go(4)
    status = Path(f"/proc/{worker.process.pid}/stat")
    eventually(
        lambda: status.read_text().rpartition(")")[2].split()[0] == "T", "the worker to stand still"
    )
    before, killed = pair.status(PRIMARY), pair.process(PRIMARY)
    killed.process.kill()
    killed.process.wait()
    pair.wait_replaced(before)
    killed.start()
    worker.process.kill(signal.SIGCONT)
    check_ended_alike(running, worker, alone)


@pytest.mark.parametrize(
    "seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_run_ends_like_a_fault_free_one_whichever_replica_is_killed_at_any_moment(
    cluster: Make, alone: dict[str, Any], seed: int
) -> None:
    schedule = random.Random(seed)
    running = cluster(servers=1, backups=1)
    pair = Pair(running)
    worker = running.start_worker(epochs=2, hold_at=[2 * BATCHES - 1], delay_s=0.05, **ADAM)
    worker.wait_step(1)
    for step in sorted(schedule.sample(range(2, 2 * BATCHES - 8), 6)):
        eventually(lambda reached=step: worker.reached(reached), f"step {step}")
        if schedule.random() < 0.7:  # otherwise it may be killed while it catches up
            pair.wait_in_sync()
        role = PRIMARY if pair.status(BACKUP).in_sync and schedule.random() < 0.6 else BACKUP
        struck = pair.process(role)
        struck.process.kill()
        struck.process.wait()
        struck.start()
    worker.go(2 * BATCHES - 1)
    check_ended_alike(running, worker, alone)


def test_stalled_backup_is_dropped_and_follows_again_when_it_continues(
    cluster: Make, alone: dict[str, Any]
) -> None:
    running = cluster(servers=1, backups=1)
    pair = Pair(running)
    worker = running.start_worker(epochs=2, hold_at=[4, 8, 20], **ADAM)
    worker.wait_step(4)
    pair.wait_in_sync()
    stopped = pair.process(BACKUP)
    stopped.process.kill(signal.SIGSTOP)
    worker.go(4)
    worker.wait_step(8)  # long before its lease expires
    assert not pair.status(BACKUP).in_sync
    stopped.process.kill(signal.SIGCONT)
    worker.go(8)
    pair.wait_in_sync()
    before = pair.process(PRIMARY)
    before.process.kill()
    before.process.wait()
    worker.wait_step(20)
    before.start()
    worker.go(20)
    check_ended_alike(running, worker, alone)


def test_primary_that_stalled_past_its_lease_acknowledges_nothing_afterwards(
    cluster: Make, alone: dict[str, Any]
) -> None:
    running = cluster(servers=1, backups=1, lease_ms=1_000)
    pair = Pair(running)
    worker = running.start_worker(epochs=2, hold_at=[4, 12], **ADAM)
    worker.wait_step(4)
    pair.wait_in_sync()
    before, stopped = pair.status(PRIMARY), pair.process(PRIMARY)
    stopped.process.kill(signal.SIGSTOP)
    pair.wait_replaced(before)
    stopped.process.kill(signal.SIGCONT)
    worker.go(4)  # it may try the server that it knows first
    worker.wait_step(12)
    pair.wait_in_sync()
    assert pair.status(BACKUP).server_id == before.server_id
    assert versions(pair.process(PRIMARY)) == {1 + 12}
    worker.go(12)
    check_ended_alike(running, worker, alone)


@pytest.mark.parametrize("transport", ["memory", "tcp", "grpc"])
def test_push_to_a_frozen_primary_is_repeated_as_soon_as_its_backup_has_taken_over(
    cluster: Make, alone: dict[str, Any], transport: str
) -> None:
    running = cluster(servers=1, backups=1, lease_ms=3_000)
    pair = Pair(running)
    environment = {"SHOAL_SERVER_TRANSPORT": transport}
    worker = running.start_worker(epochs=2, hold_at=[4, 12], environment=environment, **ADAM)
    worker.wait_step(4)
    pair.wait_in_sync()
    before, frozen = pair.status(PRIMARY), pair.process(PRIMARY)
    frozen.process.kill(signal.SIGSTOP)
    worker.go(4)
    waited = eventually(
        lambda: next(
            (m.progress for m in running.job().members if m.progress.server_wait_s > 1), None
        ),
        "a wait",
    )
    assert waited.awaited_server == f"parameter server 0 at {before.address}"
    pair.wait_replaced(before)
    replaced_at = time.monotonic()
    worker.wait_step(6)
    assert time.monotonic() < replaced_at + 5  # about 1 s; a minute without news of it
    worker.wait_step(12)
    assert versions(pair.process(PRIMARY)) == {1 + 12}
    worker.go(12)
    check_ended_alike(running, worker, alone)


def test_reader_continues_as_soon_as_the_backup_of_a_frozen_primary_has_taken_over(
    cluster: Make,
) -> None:
    running = cluster(servers=1, backups=1, lease_ms=3_000)
    pair = Pair(running)
    worker = running.start_worker(epochs=1, hold_at=[4], **ADAM)
    worker.wait_step(4)
    pair.wait_in_sync()
    coordinator = ChannelSettings(address=running.coordinator.address)
    with ModelReader(coordinator, running.job_id) as reader, ThreadPoolExecutor(1) as threads:
        model = reader.state_dict()
        before = pair.status(PRIMARY)
        pair.process(PRIMARY).process.kill(signal.SIGSTOP)
        again = threads.submit(reader.state_dict)
        pair.wait_replaced(before)
        assert again.result(timeout=5).keys() == model.keys()  # about 1 s
    worker.go(4)
    worker.result()


def test_primary_without_a_backup_in_sync_is_awaited(cluster: Make, alone: dict[str, Any]) -> None:
    running = cluster(servers=1, backups=1)
    pair = Pair(running)
    worker = running.start_worker(epochs=2, hold_at=[4, 12], **ADAM)
    worker.wait_step(4)
    pair.wait_in_sync()
    primary, backup = pair.process(PRIMARY), pair.process(BACKUP)
    for each in (backup, primary):
        each.process.kill()
        each.process.wait()
    worker.go(4)
    backup.start()
    eventually(lambda: pair.status(BACKUP).alive, "the backup to be back")
    assert not worker.reached(5)
    primary.start()
    worker.wait_step(12)
    worker.go(12)
    check_ended_alike(running, worker, alone)


def test_primary_asked_to_end_hands_over(cluster: Make, alone: dict[str, Any]) -> None:
    running = cluster(servers=1, backups=1)
    pair = Pair(running)
    worker = running.start_worker(epochs=2, hold_at=[4, 12], **ADAM)
    worker.wait_step(4)
    pair.wait_in_sync()
    before, received = pair.status(PRIMARY), pair.process(PRIMARY)
    received.process.kill(signal.SIGTERM)
    worker.go(4)
    assert received.process.wait() == 0
    pair.wait_replaced(before)
    worker.wait_step(12)
    worker.go(12)
    check_ended_alike(running, worker, alone)
