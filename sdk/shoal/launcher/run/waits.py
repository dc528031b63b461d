"""Describes in words what a run that is starting is waiting for. Pure.

On a busy machine, importing torch and starting the coordinator can take minutes, in which nothing
else is printed.
"""

from __future__ import annotations

from typing import Final

PLAIN_AFTER_S: Final = 600.0
"""Time in seconds after which workers that have not joined the job are assumed to run a script that
does not use Shoal."""
_IMPORTS_S: Final = 120.0
"""Time in seconds that workers may need to import their packages (transformers, for example) on a
busy machine. Only then is a script that does not use Shoal a likely reason."""


def awaited(
    *,
    checking: bool,
    importing: bool,
    open_: bool,
    workers: int,
    started: int,
    joined: int,
    seconds: float,
) -> str:
    """Returns what the run is waiting for, as part of a sentence; empty if that is unknown.

    Args:
        checking: True if the machine's health checks are in progress.
        importing: True if the process that forks the workers is still importing torch.
        open_: True if the coordinator responds and knows the job.
        workers: number of workers on this machine.
        started: number of workers that are running.
        joined: number of running workers that have joined the job.
        seconds: seconds since the start of the run.
    """
    waits = []
    if not started:
        if checking:
            waits.append("the health checks of this machine")
        if importing:
            waits.append("torch to be imported")
    if not open_:
        waits.append("the coordinator")
    if not started:
        return " and ".join(waits) or "the workers to start"
    if joined:
        missing = workers - joined
        waits.append(f"{missing} of {workers} workers to join" if missing > 0 else "the first step")
    elif seconds < PLAIN_AFTER_S:
        reason = (
            "they may still be importing packages"
            if seconds < _IMPORTS_S
            else "a script that does not use Shoal never joins"
        )
        waits.append(f"{workers} of {workers} workers to join ({reason})")
    return " and ".join(waits)
