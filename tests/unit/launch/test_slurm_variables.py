"""The run's variables that follow from a SLURM allocation."""

from __future__ import annotations

import pytest
from shoal.launcher.clusters.coordination import _variables
from shoal.launcher.clusters.slurm import allocated, run_id, run_variables
from shoal_common.errors import ConfigurationError

ALLOCATION = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NUM_NODES": "3"}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, "slurm-1234"),
        ({"SLURM_RESTART_COUNT": "0"}, "slurm-1234"),
        ({"SLURM_RESTART_COUNT": "2"}, "slurm-1234-2"),
        ({"SLURM_HET_JOB_ID": "1200"}, "slurm-1200"),
    ],
)
def test_each_start_of_an_allocation_has_its_own_id(more: dict[str, str], expected: str) -> None:
    assert run_id({**ALLOCATION, **more}) == expected


def test_one_machine_of_an_allocation_suffices_to_continue() -> None:
    assert run_variables(ALLOCATION) == {
        "PET_NNODES": "1:3",
        "PET_RDZV_CONF": "last_call_timeout=30",
    }


@pytest.mark.parametrize("number", ["", "0", "three"])
def test_number_that_slurm_would_not_set_is_named(number: str) -> None:
    with pytest.raises(ConfigurationError, match="SLURM_JOB_NUM_NODES"):
        run_variables({**ALLOCATION, "SLURM_JOB_NUM_NODES": number})


def test_existing_variables_win_except_for_the_coordinator() -> None:
    given = {
        **ALLOCATION,
        "PET_RDZV_ID": "mine",
        "PET_NNODES": "2:3",
        "PET_RDZV_ENDPOINT": "other:7000",
    }
    variables = _variables("n1:4000", "srun", given)
    assert (
        variables["PET_RDZV_ID"]
        == variables["SHOAL_JOB_ID"]
        == variables["SHOAL_PS_SERVER_JOB"]
        == "mine"
    )
    assert variables["PET_NNODES"] == "2:3"
    assert (
        variables["PET_RDZV_ENDPOINT"]
        == variables["SHOAL_COORDINATOR"]
        == variables["SHOAL_PS_SERVER_COORDINATOR"]
        == "n1:4000"
    )


def test_launcher_decides_the_number_of_machines_without_slurm() -> None:
    assert not allocated({})
    variables = _variables("n1:4000", "/usr/bin/mpiexec", {})
    assert variables["PET_RDZV_ID"].startswith("mpiexec-")
    assert "PET_NNODES" not in variables
