"""A client in the test process, which shares the registry and the submissions with the commands of
`shell`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from shoal.client import Client
from shoal.launcher.run.submissions import Submissions


@pytest.fixture
def here(shell: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`shell`, whose environment is also set in this process. Submitted jobs are removed when the
    test ends."""
    for name in [name for name in os.environ if name.startswith(("SHOAL_", "PET_"))]:
        monkeypatch.delenv(name)
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, shell.environment[name])
    yield shell
    for submission in Submissions().all():
        submission.kill()
        assert not submission.is_running


@pytest.fixture
def client(here: Any) -> Iterator[Client]:
    with Client(timeout=timedelta(seconds=30)) as client:
        yield client
