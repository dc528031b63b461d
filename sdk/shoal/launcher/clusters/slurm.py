"""Converts SLURM's description of an allocation to the variables of `shoal run` and
`shoal-ps-server`."""

from __future__ import annotations

from collections.abc import Mapping

from shoal_common.errors import ConfigurationError

_JOIN_GRACE_S = 30
"""Time in seconds for which the first machine waits for others. The machines of an allocation start
their launchers at once, so it is worth waiting for the last one."""


def allocated(environment: Mapping[str, str]) -> bool:
    """Returns whether this process runs in a SLURM allocation."""
    return "SLURM_JOB_ID" in environment


def run_id(environment: Mapping[str, str]) -> str:
    """Returns a job id for this start of the allocation: `slurm-1234`, or `slurm-1234-2` if SLURM
    has requeued it twice.

    All parts of a heterogeneous job have the same id.
    """
    job = environment.get("SLURM_HET_JOB_ID") or environment["SLURM_JOB_ID"]
    restarts = (
        _number(environment, "SLURM_RESTART_COUNT", least=0)
        if "SLURM_RESTART_COUNT" in environment
        else 0
    )
    return f"slurm-{job}-{restarts}" if restarts else f"slurm-{job}"


def run_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns torchrun's variables for one launcher per machine of the allocation. A single
    launcher is enough to continue. Raises ConfigurationError."""
    nodes = _number(environment, "SLURM_JOB_NUM_NODES", least=1)
    return {"PET_NNODES": f"1:{nodes}", "PET_RDZV_CONF": f"last_call_timeout={_JOIN_GRACE_S}"}


def _number(environment: Mapping[str, str], name: str, *, least: int) -> int:
    text = environment.get(name, "")
    if not text.isdecimal() or int(text) < least:
        raise ConfigurationError(
            f"{name}={text!r}: expected a number of at least {least}, as SLURM sets it"
        )
    return int(text)
