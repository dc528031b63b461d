"""Formats a launcher's final messages about failed workers as torchrun does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from shoal.launcher.workers.policy import WorkerExit

_RULE: Final = "=" * 60
_LINE: Final = "-" * 60
_MOST_SURVIVED: Final = 10


def failure_summary(
    program: str, failures: Sequence[WorkerExit], survived: Sequence[WorkerExit] = ()
) -> str:
    """Describes the first failure, with its traceback, as the likely cause, and lists the later
    failures, which are probably its consequences. `survived`: failures that the run recovered
    from."""
    first, *others = failures
    lines = [
        _RULE,
        f"{program} FAILED",
        _LINE,
        "First failure (most likely the cause of the others):",
        *_details(first),
    ]
    if others:
        lines += [
            _LINE,
            "Later failures:",
            *(f"  {_moment(failure)} {_later(failure, first)}" for failure in others),
        ]
    if survived:
        lines += [_LINE, "Failures from which the run recovered, newest last:"]
        lines += [
            f"  {_moment(failure)} {failure_line(failure)}"
            for failure in survived[-_MOST_SURVIVED:]
        ]
    return "\n".join([*lines, _RULE]) + "\n"


def survived_summary(survived: Sequence[WorkerExit], *, stopped: bool) -> str:
    """Returns one line about failed workers in a run that nevertheless completed or was stopped on
    request."""
    names = ", ".join(
        f"{failure.who} (pid {failure.pid}, {failure.status})" for failure in survived
    )
    count = "1 worker failure" if len(survived) == 1 else f"{len(survived)} worker failures"
    return f"run {'stopped' if stopped else 'completed'}; recovered from {count}: {names}"


def _later(failure: WorkerExit, first: WorkerExit) -> str:
    """Returns one line about a later failure. Omits the error if the first failure has the same
    error."""
    if failure.message and failure.message == first.message:
        failure = replace(failure, message="the same error")
    return failure_line(failure)


def failure_line(failure: WorkerExit) -> str:
    """Returns one line about a failure, with the worker, its host and the cause."""
    message = failure.message.strip().partition("\n")[0]
    return f"{failure.who} on {failure.host} (pid {failure.pid}) ended with {failure.status}" + (
        f": {message}" if message else ""
    )


def _moment(failure: WorkerExit) -> str:
    return (
        datetime.fromtimestamp(failure.unix_s, UTC)
        .astimezone()
        .isoformat(sep=" ", timespec="milliseconds")
    )


def _details(failure: WorkerExit) -> list[str]:
    started_as = failure.started_as
    ending = (
        f"{failure.status.code} ({failure.status})"
        if failure.status.signal
        else str(failure.status.code)
    )
    lines = [
        f"  time      : {_moment(failure)}",
        f"  host      : {failure.host}",
        f"  rank      : {failure.rank} (local_rank: {failure.index})"
        + (f", output [{started_as}]" if started_as != failure.rank else ""),
        f"  exit code : {ending}, pid {failure.pid}",
    ]
    if text := failure.traceback or failure.message:
        lines += ["  error     :", *(f"    {line}" for line in text.strip().splitlines())]
    return lines
