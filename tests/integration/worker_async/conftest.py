"""One coordinator and one zygote for all tests here; a job with its own servers for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.worker_async.async_cluster import AsyncCluster, Coordinator, Zygote, async_cluster


@pytest.fixture(scope="package")
def zygote(leftover_processes: None) -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="package")
def coordinator(leftover_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    coordinator = Coordinator(tmp_path_factory.mktemp("coordinator"))
    yield coordinator
    coordinator.stop()


@pytest.fixture
def cluster(zygote: Zygote, coordinator: Coordinator, tmp_path: Path) -> Iterator[Callable[..., AsyncCluster]]:
    """cluster(**settings) -> AsyncCluster, closed when the test ends."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(
            async_cluster(zygote, settings.pop("coordinator", coordinator), settings.pop("directory", tmp_path), **settings)
        )
