"""The benchmark finds a torch that has `_reconfigure` among the installed environments."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.errors import MeasurementError


def environment(root: Path, version: str, *, complete: bool = True) -> Path:
    """Creates what `make test-torch` leaves of an environment, without its packages."""
    python = root / f".venv-torch-{version}/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    if complete:
        (python.parent.parent / "installed").touch()
    return python


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose interpreter has torch 2.13."""
    monkeypatch.setattr(peers, "REPOSITORY", tmp_path)
    monkeypatch.setattr(peers, "version", lambda _: "2.13.0+cpu")
    return tmp_path


def test_current_interpreter_is_used_if_its_torch_can_reconfigure(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(repository, "2.15.0")
    monkeypatch.setattr(peers, "version", lambda _: "2.14.1")
    assert peers.reconfiguring_python() == (Path(sys.executable), "2.14.1")


def test_newest_complete_environment_is_the_fallback(repository: Path) -> None:
    environment(repository, "2.9.1")
    environment(repository, "2.12.1")
    expected = environment(repository, "2.14.1")
    environment(repository, "2.15.0", complete=False)
    assert peers.reconfiguring_python() == (expected, "2.14.1")


def test_missing_environment_names_what_to_install(repository: Path) -> None:
    environment(repository, "2.12.1")
    with pytest.raises(MeasurementError, match=r"torch 2.13.0\+cpu has no _reconfigure, .*make "):
        peers.reconfiguring_python()
