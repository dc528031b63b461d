"""Parameter servers with backups: a primary that is killed is replaced at once, and nothing that was acknowledged is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from shoal_protos.v1 import coordinator_pb2
from shoal_worker.data.record import audit

from tests.integration.worker_async.async_cluster import AsyncCluster, Server
from tests.integration.worker_async.test_async_server_faults import BATCHES, versions
from tests.zygote.children import eventually

Make = Callable[..., AsyncCluster]

PRIMARY, BACKUP = coordinator_pb2.SERVER_ROLE_PRIMARY, coordinator_pb2.SERVER_ROLE_BACKUP


def of_place(running: AsyncCluster, index: int, role: int) -> coordinator_pb2.ServerStatus:
    (found,) = (each for each in running.job().servers if each.server_index == index and each.role == role)
    return found


def process_of(running: AsyncCluster, status: coordinator_pb2.ServerStatus) -> Server:
    return running.servers[int(status.server_id.removeprefix("server-"))]


def wait_in_sync(running: AsyncCluster, index: int = 0) -> None:
    eventually(lambda: of_place(running, index, BACKUP).in_sync, f"a backup of server {index} that is in sync")


@pytest.mark.parametrize("optimizer", ["AdamW"])
def test_a_primary_that_is_killed_is_replaced_by_its_backup_and_nothing_is_lost(cluster: Make, optimizer: str) -> None:
    running = cluster(servers=1, backups=1)
    worker = running.start_worker(epochs=2, hold_at=[4, 8, 12], optimizer=optimizer, settings={"lr": 0.05})
    for hold in (4, 8):
        worker.wait_step(hold)
        wait_in_sync(running)
        before = of_place(running, 0, PRIMARY)
        killed = process_of(running, before)
        killed.process.kill()
        killed.process.wait()
        worker.go(hold)
        eventually(lambda gone=before: of_place(running, 0, PRIMARY).server_id != gone.server_id, "another primary")
        killed.start()  # it comes back as the backup
    worker.wait_step(12)
    assert versions(process_of(running, of_place(running, 0, PRIMARY))) == {1 + 12}
    worker.go(12)
    assert worker.result()["steps"] == 2 * BATCHES
    assert "came back without" not in worker.process.said()
    assert audit(running.records).exactly_once
