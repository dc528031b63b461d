"""One coordinator shared by all tests in this folder; each test's job has its own servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from shoal_worker.elastic.session.session import Session

from tests.integration.coordinator.harness import Coordinator
from tests.integration.worker_async.async_cluster import AsyncCluster, async_cluster
from tests.zygote.children import Zygote


@pytest.fixture(scope="package")
def coordinator(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    coordinator = Coordinator(zygote, tmp_path_factory.mktemp("coordinator")).start()
    yield coordinator
    coordinator.close()


@pytest.fixture
def cluster(
    zygote: Zygote, coordinator: Coordinator, tmp_path: Path
) -> Iterator[Callable[..., AsyncCluster]]:
    """cluster(**settings) -> AsyncCluster, closed when the test ends."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(
            async_cluster(
                zygote,
                settings.pop("coordinator", coordinator),
                settings.pop("directory", tmp_path),
                **settings,
            )
        )


@pytest.fixture
def running(cluster: Callable[..., AsyncCluster]) -> AsyncCluster:
    return cluster(keeps_data=False)


@pytest.fixture
def session(running: AsyncCluster) -> Iterator[Session]:
    with running.member() as session:
        yield session
