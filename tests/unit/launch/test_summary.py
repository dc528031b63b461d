"""The summary of a failed run, as a person reads it."""

from __future__ import annotations

from shoal.launcher.processes.process import ExitStatus
from shoal.launcher.report.summary import failure_line, failure_summary, survived_summary
from shoal.launcher.workers.policy import WorkerExit


def failure(rank: int, *, message: str = "", started_as: int | None = None) -> WorkerExit:
    return WorkerExit(
        index=0,
        rank=rank,
        started_as=rank if started_as is None else started_as,
        pid=77,
        status=ExitStatus(1),
        host="alpha",
        unix_s=1.0,
        message=message,
        traceback=f"Traceback\n{message}" if message else "",
    )


def test_cause_is_shown_first_with_its_traceback_and_its_consequences_in_a_line_each() -> None:
    text = failure_summary(
        "train.py",
        [failure(2, message="ValueError: a bug"), failure(0, message="OSError: closed\nmore")],
    )
    first, later = text.split("Later failures:")
    assert "  rank      : 2 " in first
    assert "    Traceback\n    ValueError: a bug" in first
    assert "rank 0 on alpha (pid 77) ended with exit code 1: OSError: closed" in later
    assert "Traceback" not in later


def test_excused_failures_are_distinguished_from_the_cause() -> None:
    text = failure_summary("train.py", [failure(1)], [failure(0, started_as=3)])
    assert (
        text.index("First failure")
        < text.index("the run recovered")
        < text.index("rank 0 (output [3]) on alpha")
    )


def test_one_line_names_rank_host_and_exception() -> None:
    assert (
        failure_line(failure(1, message="ValueError: a bug"))
        == "rank 1 on alpha (pid 77) ended with exit code 1: ValueError: a bug"
    )


def test_stopped_run_is_not_called_completed() -> None:
    line = "run {}; recovered from 1 worker failure: rank 1 (pid 77, exit code 1)"
    assert survived_summary([failure(1)], stopped=False) == line.format("completed")
    assert survived_summary([failure(1)], stopped=True) == line.format("stopped")
