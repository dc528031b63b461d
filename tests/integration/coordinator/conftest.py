"""Coordinators with a real Valkey."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shoal_common.clients import CoordinatorClient
from shoal_common.redis import EmbeddedRedis

from tests.integration.coordinator.harness import Coordinator, Job, Server, create_job
from tests.zygote.children import Zygote


@pytest.fixture(scope="session")
def shared_coordinator(
    zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Coordinator]:
    """One coordinator with its embedded Valkey, for all tests that stop neither."""
    coordinator = Coordinator(zygote, tmp_path_factory.mktemp("coordinator")).start()
    yield coordinator
    coordinator.close()


@pytest.fixture
def client(shared_coordinator: Coordinator) -> Iterator[CoordinatorClient]:
    with shared_coordinator.client() as client:
        yield client


@pytest.fixture
def make_job(
    shared_coordinator: Coordinator, client: CoordinatorClient
) -> Iterator[Callable[..., Job]]:
    """Creates jobs with unique ids."""
    jobs: list[Job] = []

    def make(**settings: Any) -> Job:
        job = create_job(shared_coordinator, client, **settings)
        jobs.append(job)
        return job

    yield make
    for job in jobs:
        job.close()


@pytest.fixture
def make_server() -> Iterator[Callable[..., Server]]:
    """Opens sessions of parameter servers."""
    servers: list[Server] = []

    def make(job: Job, name: str, **more: Any) -> Server:
        servers.append(Server(job, name, **more))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A Valkey that the test may stop."""
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def make_coordinator(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., Coordinator]]:
    """Starts coordinators that belong to the test."""
    started: list[Coordinator] = []

    def make(*flags: str, wait: bool = True, **more: Any) -> Coordinator:
        coordinator = Coordinator(zygote, tmp_path, *flags, **more).start(wait=wait)
        started.append(coordinator)
        return coordinator

    yield make
    for coordinator in started:
        coordinator.close()
