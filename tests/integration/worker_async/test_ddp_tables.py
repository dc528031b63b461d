"""Sparse tables under ddp: the rows of each step reach the servers completely and once, even if
ranks die, and for any number of ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shoal_worker.data.record import audit

from tests.integration.coordinator.harness import Coordinator
from tests.integration.worker_async.async_cluster import AsyncCluster, Worker, async_cluster
from tests.unit.common.test_failpoints import documented
from tests.zygote.children import Zygote, eventually

Make = Callable[..., AsyncCluster]
SCRIPT = Path(__file__).with_name("ddp_tables.py")
EPOCHS = 4
STEPS = 6 * EPOCHS


def start(running: AsyncCluster, *, failpoints: str = "", **config: Any) -> Worker:
    return running.start_worker(
        program=SCRIPT, environment={"SHOAL_FAILPOINTS": failpoints}, **{"epochs": EPOCHS, **config}
    )


def check_ended_alike(
    workers: list[Worker], fault_free: dict[str, Any], running: AsyncCluster
) -> None:
    for worker in workers:
        result = worker.result()
        assert result["steps"] == STEPS
        assert result["digest"] == fault_free["digest"]
        assert result["evaluation"] == pytest.approx(fault_free["evaluation"])
        assert "WARNING" not in worker.process.said() or "lost" in worker.process.said()
    verdict = audit(running.records)
    assert all(epoch.exactly_once for epoch in verdict.epochs), verdict


@pytest.fixture(scope="module")
def fault_free(
    zygote: Zygote, coordinator: Coordinator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """Returns the final state of a run of one worker."""
    with async_cluster(zygote, coordinator, tmp_path_factory.mktemp("alone"), servers=1) as running:
        worker = start(running)
        result = worker.result()
        assert result["steps"] == STEPS
        assert result["lost"] == 0
        yield result


def test_two_ranks_end_with_the_rows_of_one_process(
    cluster: Make, fault_free: dict[str, Any]
) -> None:
    running = cluster(together=2)
    check_ended_alike([start(running), start(running)], fault_free, running)


@pytest.mark.parametrize(
    "name", sorted(name for name in documented("Workers") if name.startswith("tables."))
)
def test_rank_killed_during_a_push_neither_loses_nor_doubles_a_row(
    cluster: Make, fault_free: dict[str, Any], name: str
) -> None:
    running = cluster(together=3, min_workers=1)
    workers = [start(running), start(running, failpoints=f"{name}@9=kill"), start(running)]
    assert workers[1].process.wait() == -signal.SIGKILL
    check_ended_alike([workers[0], workers[2]], fault_free, running)


def test_a_server_killed_while_ranks_train_costs_no_row(
    cluster: Make, fault_free: dict[str, Any]
) -> None:
    running = cluster(together=2)
    workers = [start(running, hold_at=[8, 15]), start(running)]
    for step, server in zip((8, 15), running.servers, strict=True):
        eventually(
            (workers[0].directory / f"step-{step}").exists,
            f"step {step}: {workers[0].process.said()}",
        )
        server.process.kill()
        server.process.wait()
        server.start()
        (workers[0].directory / f"go-{step}").touch()
    check_ended_alike(workers, fault_free, running)


def test_joining_rank_continues_with_the_rows_of_its_peers(
    cluster: Make, fault_free: dict[str, Any]
) -> None:
    running = cluster()
    first = start(running, hold_at=[7])
    eventually((first.directory / "step-7").exists, "step 7")
    second = start(running)
    eventually(lambda: len(running.job().generation.ranks) == 2, "two ranks")
    (first.directory / "go-7").touch()
    check_ended_alike([first, second], fault_free, running)
    assert first.result()["world"] == 2


def test_plain_batches_train_rows_as_micro_batches_do(
    cluster: Make, fault_free: dict[str, Any]
) -> None:
    running = cluster(together=2)
    for worker in [start(running, micro=False), start(running, micro=False)]:
        assert worker.result()["values"] == pytest.approx(fault_free["values"], rel=1e-4, abs=1e-5)


def test_missing_servers_are_named_in_the_error(cluster: Make) -> None:
    running = cluster(servers=0)
    worker = start(running)
    assert worker.process.wait() != 0
    assert "sparse tables need parameter servers" in worker.process.said()
    assert "--servers 2" in worker.process.said()
