"""Batches are leased in blocks. Training continues while the coordinator is away, and each batch is
applied once, even if a worker or server dies."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from shoal_common.redis.embedded import EmbeddedRedis
from shoal_ps_server.storage.snapshot import read_snapshot
from shoal_worker.data.record import audit

from tests.integration.coordinator.harness import Coordinator
from tests.integration.worker_async.async_cluster import AsyncCluster, Worker
from tests.integration.worker_async.train import SAMPLES
from tests.zygote.children import Zygote, eventually

Make = Callable[..., AsyncCluster]

FAR_AHEAD = {"lease_ahead_s": 600}
"""A lease so long that a worker acknowledges batches only when it requests more, at half of a
block."""


def versions(running: AsyncCluster) -> set[int]:
    """Waits for the servers to end and returns the partition versions in their last snapshots."""
    found: set[int] = set()
    for server in running.servers:
        server.process.wait()
        image = read_snapshot(server.data / "snapshot.safetensors")
        assert image is not None
        found |= {partition.version for partition in image.partitions}
    return found


def assert_leaves(worker: Worker) -> None:
    """Sends SIGTERM and checks that the worker exits with status 0 within 20 s."""
    worker.process.kill(signal.SIGTERM)
    received = time.monotonic()
    assert worker.process.wait() == 0, worker.process.said()
    assert time.monotonic() - received < 20


@pytest.mark.parametrize("consistency", ["asp", pytest.param("ssp", marks=pytest.mark.slow)])
def test_unacknowledged_batches_of_a_dead_worker_are_not_applied_twice(
    cluster: Make, consistency: str
) -> None:
    """This also holds if a server is killed and recovers before the batches are dealt again."""
    running = cluster(together=2)
    options = FAR_AHEAD | (
        {"consistency": "ssp", "staleness_bound": 30} if consistency == "ssp" else {}
    )
    victim = running.start_worker(epochs=2, batch_size=1, hold_at=[20], options=options)
    other = running.start_worker(epochs=2, batch_size=1, hold_at=[1], options=options)
    other.wait_step(1)
    victim.wait_step(20)
    victim.process.kill()  # at once: a worker acknowledges pushed batches now and then
    running.servers[0].process.kill()
    running.servers[0].process.wait()
    running.servers[0].start()
    other.go(1)
    # Batches that were pushed but not acknowledged are dealt again. How many were acknowledged
    # depends on when the victim last requested more.
    assert other.result()["steps"] >= 2 * SAMPLES - 20
    assert versions(running) == {1 + 2 * SAMPLES}
    assert audit(running.records).exactly_once


@pytest.fixture
def coordinator_of_its_own(zygote: Zygote, tmp_path: Path) -> Iterator[Coordinator]:
    """A coordinator that the test can kill, and that finds its state again when it restarts."""
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis(tmp_path / "redis"))
        coordinator = Coordinator(zygote, tmp_path, "--redis", redis.url).start()
        stack.callback(coordinator.close)
        yield coordinator


def test_workers_train_on_while_the_coordinator_is_away(
    cluster: Make, coordinator_of_its_own: Coordinator
) -> None:
    running = cluster(together=2, coordinator=coordinator_of_its_own)
    workers = [
        running.start_worker(epochs=2, batch_size=1, hold_at=[10], delay_s=0.002) for _ in range(2)
    ]
    for worker in workers:
        worker.wait_step(10)
    coordinator_of_its_own.kill()
    for worker in workers:
        worker.go(10)
    for worker in workers:
        worker.wait_step(30)
    coordinator_of_its_own.start()
    assert sum(worker.result()["steps"] for worker in workers) == 2 * SAMPLES
    assert versions(running) == {1 + 2 * SAMPLES}
    assert audit(running.records).exactly_once


@pytest.mark.slow
def test_worker_that_waits_for_the_coordinator_leaves_when_asked(
    cluster: Make, coordinator_of_its_own: Coordinator
) -> None:
    running = cluster(coordinator=coordinator_of_its_own)
    worker = running.start_worker(epochs=1, hold_at=[2], options={"lease_ahead_s": 0})
    worker.wait_step(2)
    coordinator_of_its_own.kill()
    worker.go(2)
    eventually(
        lambda: "cannot lease further batches from the coordinator" in worker.process.said(),
        "the worker to wait for its next batch",
    )
    assert_leaves(worker)


def test_worker_that_waits_for_a_server_leaves_when_asked(cluster: Make) -> None:
    running = cluster(servers=1)
    worker = running.start_worker(epochs=1, hold_at=[2])
    worker.wait_step(2)
    running.servers[0].process.kill()
    running.servers[0].process.wait()
    worker.go(2)
    eventually(
        lambda: "Push failed and will be retried" in worker.process.said(),
        "the worker to wait for the server",
    )
    assert_leaves(worker)


def test_worker_that_waits_for_servers_at_the_start_leaves_when_asked(
    cluster: Make,
) -> None:
    running = cluster(servers=1)
    running.servers[0].process.kill()
    running.servers[0].process.wait()
    worker = running.start_worker(epochs=1)
    eventually(
        lambda: any(member.rank >= 0 for member in running.job().members),
        "the worker to have a rank",
    )
    assert_leaves(worker)
