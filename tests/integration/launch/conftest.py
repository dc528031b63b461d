"""A coordinator that no launcher owns, as in a cluster of several machines."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.coordinator import harness
from tests.zygote.children import Zygote


class Coordinator:
    """A coordinator that no launcher owns, at a fixed address."""

    def __init__(self, zygote: Zygote, directory: Path) -> None:
        directory.mkdir()
        self._data = directory / "redis"
        self._running = harness.Coordinator(
            zygote, directory, "--redis", f"embedded://{self._data}"
        ).start()

    @property
    def address(self) -> str:
        """host:port."""
        return self._running.address

    @property
    def http_address(self) -> str:
        """Address of the coordinator's pages, host:port."""
        return str(self._running.ports["http"])

    def lose_data(self) -> None:
        """Restarts the store without any data, as after the loss of its disk."""
        self._running.kill()
        shutil.rmtree(self._data)
        self._running.start()

    def close(self) -> None:
        self._running.close()


@pytest.fixture
def coordinator(zygote: Zygote, tmp_path: Path) -> Iterator[Coordinator]:
    running = Coordinator(zygote, tmp_path / "coordinator")
    yield running
    running.close()


@pytest.fixture
def endpoint(coordinator: Coordinator) -> str:
    """Endpoint of a coordinator that no launcher owns."""
    return coordinator.address
