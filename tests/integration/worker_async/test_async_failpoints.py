"""A server, a worker and the coordinator are killed at each of their failpoints in turn. Each
failpoint is reached, and no data is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from shoal_common.redis.embedded import EmbeddedRedis
from shoal_worker.data.record import audit

from tests.integration.coordinator.harness import Coordinator
from tests.integration.worker_async.async_cluster import AsyncCluster
from tests.integration.worker_async.test_async_backups import BACKUP, PRIMARY, Pair
from tests.integration.worker_async.test_async_moves import ADAM, check_ended_alike, is_even
from tests.integration.worker_async.test_async_server_faults import BATCHES, versions
from tests.unit.common.test_failpoints import documented
from tests.zygote.children import Zygote, eventually

Make = Callable[..., AsyncCluster]

ENDLESS = 1000
"""Epochs of workers that the test stops."""


@pytest.fixture
def coordinator_of_its_own(zygote: Zygote, tmp_path: Path) -> Iterator[Coordinator]:
    """A coordinator that the test can kill, and that finds its state again when it restarts."""
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis(tmp_path / "redis"))
        coordinator = Coordinator(zygote, tmp_path, "--redis", redis.url).start()
        stack.callback(coordinator.close)
        yield coordinator


@pytest.mark.slow
def test_a_server_can_be_killed_at_each_of_its_failpoints(cluster: Make) -> None:
    """The job has one server, and its worker trains on through every crash."""
    running = cluster(servers=1)
    worker = running.start_worker(epochs=ENDLESS, optimizer="Adam", settings={"lr": 0.01})
    worker.wait_step(10)
    (server,) = running.servers
    for name in sorted(documented("Parameter servers")):
        if name.startswith(("backup.", "move.")):
            continue  # tested below, and in test_ps_moves.py
        before = server.look()
        server.process.kill()
        server.process.wait()
        server.start(SHOAL_FAILPOINTS=f"{name}@1=kill")
        if name.startswith(("snapshot.", "journal.file")):
            server.try_snapshot()
        assert server.process.wait() == -signal.SIGKILL, f"{name}: {server.process.said()}"
        server.start()
        after = eventually(server.looks, f"the server after {name}")
        for one, other in zip(before.partitions, after.partitions, strict=True):
            assert one.version <= other.version, (
                f"{name} cost partition {one.partition_id} some of what it had"
            )
        came_back = after.partitions[0].version
        eventually(
            lambda least=came_back: server.look().partitions[0].version > least,
            f"training to go on after {name}",
        )
    worker.process.kill(signal.SIGTERM)
    assert worker.process.wait() == 0, worker.process.said()


def test_a_primary_and_its_backup_can_be_killed_at_each_failpoint_between_them(
    cluster: Make,
) -> None:
    running = cluster(servers=1, backups=1)
    pair = Pair(running)
    worker = running.start_worker(epochs=ENDLESS, optimizer="Adam", settings={"lr": 0.01})
    worker.wait_step(10)
    for name in sorted(
        name for name in documented("Parameter servers") if name.startswith("backup.")
    ):
        pair.wait_in_sync()
        before = versions(pair.process(PRIMARY))
        armed, other = pair.process(BACKUP), pair.process(PRIMARY)
        armed.process.kill()
        armed.process.wait()
        eventually(lambda: not pair.status(BACKUP).in_sync, "the backup to be missed")
        armed.start(SHOAL_FAILPOINTS=f"{name}@1=kill")
        if name in ("backup.promoted", "backup.before_note", "backup.holds"):  # as the next primary
            pair.wait_in_sync()
            other.process.kill()
            other.process.wait()
            other.start()
        assert armed.process.wait() == -signal.SIGKILL, f"{name}: {armed.process.said()}"
        armed.start()
        pair.wait_in_sync()
        newest = max(before)
        eventually(
            lambda least=newest: min(versions(pair.process(PRIMARY))) > least,
            f"training to go on after {name}",
        )
    worker.process.kill(signal.SIGTERM)
    assert worker.process.wait() == 0, worker.process.said()


@pytest.mark.slow
def test_transfer_source_and_sink_can_be_killed_at_each_failpoint_between_them(
    cluster: Make, tmp_path: Path
) -> None:
    """For each failpoint, a server joins and is drained again. The run ends with the same
    parameters as a run on one server."""
    running = cluster(servers=1, max_servers=2)
    (giver,) = running.servers
    names = sorted(name for name in documented("Parameter servers") if name.startswith("move."))
    worker = running.start_worker(epochs=2, hold_at=[*range(2 * BATCHES)], **ADAM)
    for step, name in enumerate(names):
        worker.wait_step(step)
        receives = name in ("move.taken", "move.activated")
        armed = {"SHOAL_FAILPOINTS": f"{name}@1=kill"}
        if not receives:
            giver.process.kill()
            giver.process.wait()
            giver.start(**armed)
        receiver = running.start_server(**armed if receives else {})
        struck = receiver if receives else giver
        assert struck.process.wait() == -signal.SIGKILL, f"{name}: {struck.process.said()}"
        struck.start()
        eventually(lambda: is_even(running, 2), f"the new server's share after {name}")
        worker.go(step)
        worker.wait_step(step + 1)
        running.client.drain_server(running.job_id, running.servers[-1].server_id)
        assert receiver.process.wait() == 0, receiver.process.said()
    for step in range(len(names), 2 * BATCHES):
        worker.go(step)
    alone = tmp_path / "alone"
    alone.mkdir()
    check_ended_alike(
        running, worker, cluster(servers=1, directory=alone).start_worker(epochs=2, **ADAM).result()
    )


@pytest.mark.slow
@pytest.mark.parametrize("service", ["Workers", "Coordinator"])
def test_workers_and_coordinators_can_be_killed_at_each_of_their_failpoints(
    cluster: Make, coordinator_of_its_own: Coordinator, service: str
) -> None:
    running = cluster(coordinator=coordinator_of_its_own)
    lasting = running.start_worker(epochs=3, hold_at=[40], delay_s=0.002)
    lasting.wait_step(1)
    if service == "Workers":
        names = [name for name in documented(service) if name.startswith("exchange.")]
        for name in sorted(names):
            victim = running.start_worker(
                epochs=3, environment={"SHOAL_FAILPOINTS": f"{name}@3=kill"}
            )
            assert victim.process.wait() == -signal.SIGKILL, f"{name}: {victim.process.said()}"
    else:
        for name in sorted(documented(service)):
            coordinator_of_its_own.kill()
            coordinator_of_its_own.start(wait=False, SHOAL_FAILPOINTS=f"{name}@3=kill")
            assert coordinator_of_its_own.process.wait() == -signal.SIGKILL, (
                f"{name}: {coordinator_of_its_own.log}"
            )
        coordinator_of_its_own.start()
    lasting.go(40)
    lasting.result()
    assert audit(running.records).exactly_once
