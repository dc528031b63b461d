"""The terminals shown on a page, with the commands of this environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sessions import Session


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """Terminals of a user who has installed Shoal and has no settings."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SHOAL_", "PET_", "OMP_"))
    }
    # of tests/conftest.py
    mark = {name: value for name, value in os.environ.items() if name == "SHOAL_PYTEST_RUN"}
    places = {
        "XDG_RUNTIME_DIR": str(tmp_path / "runtime"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    folder = tmp_path / "project"
    folder.mkdir()
    running = Session(
        folder,
        {
            **own,
            **mark,
            **places,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "120",
        },
    )
    yield running
    running.close()
