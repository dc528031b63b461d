"""Parameter servers join and leave while workers train: partitions move, and the run ends with the
same parameters as one without moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_worker.data.record import audit

from tests.integration.worker_async.async_cluster import AsyncCluster, Worker
from tests.integration.worker_async.test_async_backups import PRIMARY
from tests.integration.worker_async.test_async_server_faults import BATCHES
from tests.integration.worker_async.test_model_reader import reader_of
from tests.zygote.children import eventually

Make = Callable[..., AsyncCluster]

ADAM = {"optimizer": "AdamW", "settings": {"lr": 0.001}, "deep": 6}


LARGEST = 128 * 128 * 4
"""Bytes of one partition of a network built with `deep`."""


def stored(running: AsyncCluster) -> Mapping[str, int]:
    """Returns the bytes of values on each primary, by server id."""
    return {
        server.server_id: server.value_bytes
        for server in running.job().servers
        if server.role == PRIMARY
    }


def is_even(running: AsyncCluster, servers: int) -> bool:
    """Returns whether the values are spread over `servers` primaries, whose sizes differ by one
    partition at most."""
    held = stored(running)
    return len(held) == servers and max(held.values()) - min(held.values()) <= LARGEST


def check_ended_alike(running: AsyncCluster, worker: Worker, expected: dict[str, Any]) -> None:
    result = worker.result()
    assert result["steps"] == 2 * BATCHES
    assert result["parameters"] == expected["parameters"]
    assert "restarted without" not in worker.process.said()
    assert audit(running.records).exactly_once


@pytest.fixture
def alone(cluster: Make, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Returns a function that trains one worker on servers that do not change and returns its final
    state. Its pushes are sequential, so every such run ends with the same parameters."""

    def run(**options: Any) -> dict[str, Any]:
        directory = tmp_path / "alone"
        directory.mkdir()
        return (
            cluster(servers=2, directory=directory)
            .start_worker(epochs=2, options=options, **ADAM)
            .result()
        )

    return run


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"consistency": "ssp", "staleness_bound": 1}, marks=pytest.mark.slow),
        {"consistency": "bsp"},
        pytest.param(
            {"gradient_compression": {"name": "topk", "ratio": 0.1}}, marks=pytest.mark.slow
        ),
    ],
    ids=["asp", "ssp", "bsp", "compressed"],
)
def test_servers_join_and_leave_during_training_without_changing_the_result(
    cluster: Make, alone: Callable[..., dict[str, Any]], options: dict[str, Any]
) -> None:
    running = cluster(servers=2, max_servers=3)
    worker = running.start_worker(
        epochs=2, hold_at=[4, 12, 30], delay_s=0.005, options=options, **ADAM
    )
    worker.wait_step(4)
    running.start_server()
    worker.go(4)
    eventually(lambda: is_even(running, 3), "the new server's share")
    worker.wait_step(12)
    running.client.drain_server(running.job_id, "server-0")
    worker.go(12)
    assert running.servers[0].process.wait() == 0
    assert is_even(running, 2)
    assert "server-0" not in stored(running)
    worker.wait_step(30)
    worker.go(30)
    check_ended_alike(running, worker, alone(**options))


@pytest.mark.slow
def test_servers_join_and_leave_with_their_backups(
    cluster: Make, alone: Callable[..., dict[str, Any]]
) -> None:
    """One of them is killed once it has its partitions. Its backup, which has received them too,
    takes over."""
    running = cluster(servers=1, max_servers=2, backups=1)
    worker = running.start_worker(epochs=2, hold_at=[4, 12, 20, 30], delay_s=0.005, **ADAM)
    worker.wait_step(4)
    comes = running.start_server()
    eventually(lambda: len(running.job().servers) == 3, "the next place")
    its_backup = running.start_server()
    worker.go(4)
    eventually(lambda: is_even(running, 2), "the new server's share")
    worker.wait_step(12)
    comes.process.kill()
    comes.process.wait()
    worker.go(12)
    eventually(lambda: its_backup.server_id in stored(running), "the backup to take its place")
    comes.start()
    worker.wait_step(20)
    running.client.drain_server(running.job_id, "server-0")
    worker.go(20)
    assert [server.process.wait() for server in running.servers[:2]] == [0, 0]
    worker.wait_step(30)
    worker.go(30)
    check_ended_alike(running, worker, alone())


def test_a_reader_follows_partitions_and_reads_the_same_values_from_their_new_server(
    cluster: Make,
) -> None:
    running = cluster(servers=1, max_servers=2)
    worker = running.start_worker(epochs=1, hold_at=[4, 8], **ADAM)
    worker.wait_step(4)
    with reader_of(running) as reader:
        before = reader.state_dict()
        running.start_server()
        eventually(lambda: is_even(running, 2), "the new server's share")
        after = reader.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], value) for name, value in after.items())
        worker.go(4)
        worker.wait_step(8)
        assert not any(
            torch.equal(before[name], value) for name, value in reader.state_dict().items()
        )
    worker.go(8)
    worker.result()
