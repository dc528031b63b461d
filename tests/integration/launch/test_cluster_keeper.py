"""Services of a local cluster that die are restarted any number of times, unless they never begin
to serve."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shoal.launcher.clusters import cluster_keeper as keeper_module
from shoal.launcher.clusters.cluster import Service
from shoal.launcher.clusters.cluster_keeper import ClusterKeeper
from shoal_common.errors import DeadlineError, UnavailableError

PROGRAM = """
import json, os, sys, time
if os.environ["SERVES"] == "yes":
    path = sys.argv[sys.argv.index("--port-file") + 1]
    with open(path + ".tmp", "w") as file:
        json.dump({"grpc": "127.0.0.1:1", "http": "127.0.0.1:2", "pid": os.getpid()}, file)
    os.replace(path + ".tmp", path)
    time.sleep(600)
sys.exit(3)
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """kept(serves=...) -> (service, keeper, notes); the service is not started yet."""
    (tmp_path / "a_service.py").write_text(PROGRAM)
    monkeypatch.setattr(keeper_module, "_SHORT_LIFE_S", 0.2)
    made: list[Service] = []

    def make(*, serves: bool) -> tuple[Service, ClusterKeeper, list[str]]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "SERVES": "yes" if serves else "no",
        }
        service = Service("server-0", "a_service", [], directory=tmp_path, environment=environment)
        made.append(service)
        notes: list[str] = []
        cluster: Any = SimpleNamespace(
            services=[service], coordinator=None, serves_when_asked=False
        )
        return service, ClusterKeeper(cluster, note=notes.append), notes

    yield make
    for service in made:
        if service.started and service.child.poll() is None:
            os.kill(service.child.pid, signal.SIGKILL)
            while service.child.poll() is None:
                time.sleep(0.01)
        service.release()


def test_killed_service_is_restarted_each_time(kept: Any) -> None:
    service, keeper, notes = kept(serves=True)

    async def kill_it_often() -> None:
        service.start()
        keeping = asyncio.create_task(keeper.keep())
        async with asyncio.timeout(60):
            for kills in range(1, 8):
                while not service.ready():
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.3)  # it serves long enough to count as started
                os.kill(service.child.pid, signal.SIGKILL)
                while len(notes) < kills:
                    await asyncio.sleep(0.01)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    asyncio.run(kill_it_often())
    assert all("was restarted as pid" in note for note in notes)


def test_service_that_never_becomes_ready_is_given_up(kept: Any) -> None:
    service, keeper, notes = kept(serves=False)

    async def keep() -> None:
        service.start()
        async with asyncio.timeout(60):
            await keeper.keep()

    asyncio.run(keep())
    assert len(notes) == 1
    assert "server-0" in notes[0]
    assert "4 times in a row" in notes[0]


def test_a_coordinator_that_does_not_answer_at_once_is_asked_again_about_the_job(kept: Any) -> None:
    """The run ended before that. For a while after a failure, gRPC reports a running server as
    unreachable."""
    service, keeper, notes = kept(serves=True)
    answers = [UnavailableError("failed to connect"), DeadlineError("no answer"), None]

    def create_job() -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    keeper._cluster.coordinator, keeper._cluster.create_job = service, create_job

    async def kill_it() -> None:
        service.start()
        keeping = asyncio.create_task(keeper.keep())
        async with asyncio.timeout(60):
            while not service.ready():
                await asyncio.sleep(0.01)
            os.kill(service.child.pid, signal.SIGKILL)
            while not notes and not keeping.done():
                await asyncio.sleep(0.01)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    asyncio.run(kill_it())
    assert answers == []
    assert "was restarted as pid" in notes[0]
