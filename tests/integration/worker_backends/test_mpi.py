"""MPIBackend on four processes, started once by mpiexec (mpi_ranks.py), and what it says where there is no MPI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shoal_common.errors import ConfigurationError
from shoal_common.processes import tied_to_parent
from shoal_worker.backends import backend_class

from tests.integration.worker_backends.mpi_ranks import MPI_CHECKS

_STUB = Path(__file__).with_name("mpi_stub.py")
_DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def outcomes(_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    """What came of each check, by rank."""
    directory = tmp_path_factory.mktemp("mpi")
    mpiexec = Path(sys.executable).with_name("mpiexec")
    command = [str(mpiexec), "-n", "4", sys.executable, "-S", str(_STUB), _nursery, str(directory)]
    ended = subprocess.run(tied_to_parent(command), capture_output=True, text=True, timeout=_DEADLINE_S, env={**os.environ}, check=False)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return [json.loads((directory / str(rank)).read_text()) for rank in range(4)]


@pytest.mark.parametrize("check", MPI_CHECKS)
def test_on_mpi(outcomes: list[dict[str, str | None]], check: str) -> None:
    for rank, outcome in enumerate(outcomes):
        failure = outcome.get(check, "an earlier check failed")
        assert failure is None, f"rank {rank}: {failure}"


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigurationError, match=r"backend='mpi' needs mpi4py and an MPI library .*: pip install shoal-worker\[mpi\]"):
        backend_class("mpi")().initialize()
