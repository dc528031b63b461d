"""Converts SLURM's environment variables to the variables of `shoal run` and `shoal-ps-server`."""

from __future__ import annotations

from collections.abc import Mapping

from shoal_common.errors import ConfigurationError

_JOIN_GRACE_S = 30
"""Time in seconds that the first machine waits for others. The launchers of an allocation start at
the same time, so it is worth waiting for the last one."""


def allocated(environment: Mapping[str, str]) -> bool:
    """Returns whether this process runs in a SLURM allocation."""
    return "SLURM_JOB_ID" in environment


def run_id(environment: Mapping[str, str]) -> str:
    """Returns the job id for the current start of the allocation: `slurm-1234`, or `slurm-1234-2`
    if SLURM has requeued it twice.

    All components of a heterogeneous job get the same id.
    """
    job = environment.get("SLURM_HET_JOB_ID") or environment["SLURM_JOB_ID"]
    restarts = (
        _number(environment, "SLURM_RESTART_COUNT", least=0)
        if "SLURM_RESTART_COUNT" in environment
        else 0
    )
    return f"slurm-{job}-{restarts}" if restarts else f"slurm-{job}"


def run_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns torchrun's variables for an allocation with one launcher per machine. Training
    continues as long as at least one launcher is left. Raises ConfigurationError."""
    nodes = _number(environment, "SLURM_JOB_NUM_NODES", least=1)
    return {"PET_NNODES": f"1:{nodes}", "PET_RDZV_CONF": f"last_call_timeout={_JOIN_GRACE_S}"}


def _number(environment: Mapping[str, str], name: str, *, least: int) -> int:
    text = environment.get(name, "")
    if not text.isdecimal() or int(text) < least:
        raise ConfigurationError(
            f"{name}={text!r}: expected a number of at least {least}; SLURM sets this variable"
        )
    return int(text)
