"""A coordinator that belongs to no launcher, as on several machines."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from shoal.launcher.cluster import Service
from shoal.launcher.process import stop_all

Shell = Any  # of tests/integration/conftest.py


class Coordinator:
    """One that belongs to no launcher, at an address that it keeps."""

    def __init__(self, shell: Shell, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        arguments = ["--redis", f"embedded://{directory / 'redis'}"]
        self.service = Service("coordinator", "shoal_coordinator", arguments, directory=directory, environment=shell.environment)
        self.start()

    def start(self) -> None:
        self.service.start()
        self.service.wait_ready(timedelta(seconds=90))

    def lose_data(self) -> None:
        """As when its disk is gone: it comes back and knows of nothing."""
        stop_all([self.service.child], grace=timedelta(0))
        shutil.rmtree(self.directory / "redis")
        self.start()


@pytest.fixture
def coordinator(shell: Shell, tmp_path: Path) -> Iterator[Coordinator]:
    running = Coordinator(shell, tmp_path / "coordinator")
    yield running
    stop_all([running.service.child], grace=timedelta(seconds=10))
    running.service.release()


@pytest.fixture
def endpoint(coordinator: Coordinator) -> str:
    """Of a coordinator that belongs to no launcher."""
    address: str = coordinator.service.address
    return address
