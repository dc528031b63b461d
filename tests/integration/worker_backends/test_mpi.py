"""MPIBackend on four processes, started once by mpiexec (mpi_ranks.py), and its error if MPI is
missing."""

from __future__ import annotations

import pytest
from shoal_common.errors import ConfigurationError
from shoal_worker.backends import backend_class

from tests.integration.worker_backends.mpi_ranks import MPI_CHECKS
from tests.missing import pretend_missing
from tests.ranks.processes import mpi_world


@pytest.fixture(scope="module")
def outcomes(nursery: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    """Outcomes of the checks by rank. The checks run in a world of their own, because some of them
    damage it."""
    with mpi_world(nursery, 4, tmp_path_factory.mktemp("mpi")) as ranks:
        for rank in ranks:
            rank.start("tests.integration.worker_backends.mpi_ranks:run_checks")
        return [rank.result() for rank in ranks]


@pytest.mark.parametrize("check", MPI_CHECKS)
def test_mpi_backend_passes_each_check(outcomes: list[dict[str, str | None]], check: str) -> None:
    for rank, outcome in enumerate(outcomes):
        failure = outcome.get(check, "an earlier check failed")
        assert failure is None, f"rank {rank}: {failure}"


def test_missing_mpi4py_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_missing(monkeypatch, "mpi4py")
    with pytest.raises(
        ConfigurationError,
        match=r"backend='mpi' needs mpi4py and an MPI library .*pip install shoal-worker\[mpi\]",
    ):
        backend_class("mpi")().initialize()
