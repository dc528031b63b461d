"""What a launcher tells at the end about failed workers, in the form that torchrun's users know."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from shoal.launcher.policy import WorkerExit

_RULE = "=" * 60
_LINE = "-" * 60


def failure_summary(program: str, failures: Sequence[WorkerExit]) -> str:
    """The first failure is the cause; the others most likely follow from it."""
    first, *others = failures
    lines = [_RULE, f"{program} FAILED", _LINE]
    if others:
        lines += ["Later failures:", *(line for failure in others for line in _details(failure)), _LINE]
    lines += ["First failure (most likely the cause of the others):", *_details(first), _RULE]
    return "\n".join(lines) + "\n"


def survived_summary(survived: Sequence[WorkerExit]) -> str:
    """One line for a run that went through although workers failed."""
    names = ", ".join(f"rank {failure.rank} (pid {failure.pid}, {failure.status})" for failure in survived)
    return f"the run came to its end although {len(survived)} of its workers failed on the way: {names}"


def _details(failure: WorkerExit) -> list[str]:
    moment = datetime.fromtimestamp(failure.unix_s, UTC).astimezone().isoformat(sep=" ", timespec="milliseconds")
    ending = f"{failure.status.code} ({failure.status})" if failure.status.signal else str(failure.status.code)
    lines = [
        f"  time      : {moment}",
        f"  host      : {failure.host}",
        f"  rank      : {failure.rank} (local_rank: {failure.index})",
        f"  exit code : {ending}, pid {failure.pid}",
    ]
    if failure.message:
        lines += ["  traceback :", *(f"    {line}" for line in failure.message.strip().splitlines())]
    return lines
