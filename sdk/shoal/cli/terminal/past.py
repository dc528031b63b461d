"""Formats past runs for a terminal or as JSON. Pure, except that it uses the local time zone."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from shoal.cli.terminal.table import Column, FittingTable
from shoal.launcher.report.comparison import Row, compare
from shoal.launcher.report.history import EVENTS, PAGE, Outcome, RecordedRun, RunEnd

_NOTHING: Final = "-"
_STYLES: Final = {
    Outcome.COMPLETED: "green",
    Outcome.RUNNING: "green",
    Outcome.STOPPED: "yellow",
    Outcome.INTERRUPTED: "yellow",
    Outcome.FAILED: "red",
    Outcome.KILLED: "red",
}
_LONGEST_ARGUMENTS: Final = 40
"""Maximum number of characters of a script's arguments in the list of runs."""


def runs_view(runs: Sequence[RecordedRun]) -> RenderableType:
    """Returns a table of past runs."""
    ends = [run.end for run in runs]
    return FittingTable(
        Column("run", [run.name for run in runs], right=False),
        Column("began", [f"{_local(run.started_unix_s):%Y-%m-%d %H:%M}" for run in runs]),
        Column("took", [_took(run) for run in runs], 4),
        Column("strategy", [end.strategy if end else "" for end in ends], 5, right=False),
        Column("ranks", [str(end.ranks or _NOTHING) if end else _NOTHING for end in ends], 3),
        Column("step", [_last_step(end) for end in ends], 1),
        Column("faults", [str(end.faults) if end else _NOTHING for end in ends], 2),
        Column("outcome", [_outcome(run) for run in runs], right=False),
        Column("arguments", [_arguments(run) for run in runs], 6, right=False),
    )


def run_view(run: RecordedRun, now: datetime, account: Sequence[str]) -> RenderableType:
    """Returns a view of one run: a headline, the lines in `account`, a table of the workers, and
    commands that show more.

    `account`: lines that describe the run's faults, pauses and figures.
    """
    end = run.end
    parts: list[RenderableType] = [_headline(run, now)]
    if end is not None:
        if end.reason and end.outcome is not Outcome.COMPLETED:
            parts.append(Text(end.reason, style="yellow"))
        parts += [Text(line) for line in account]
        if end.strategy:
            parts.append(Text(f"strategy {end.strategy}, {end.ranks} ranks at most", style="dim"))
        if end.workers:
            parts.append(_worker_table(end))
    elif run.outcome is Outcome.KILLED:
        lost = f"its launcher (pid {run.pid} on {run.host}) is gone and left no result"
        parts.append(Text(f"{lost}: it was killed, or the machine was restarted", style="yellow"))
    parts.append(Text(f"command: {_command(run)}", style="dim"))
    parts.append(Text(f"output: shoal logs --run {run.name}", style="dim"))
    if (run.directory / EVENTS).exists():
        parts.append(Text(f"events: shoal events --run {run.name}", style="dim"))
    if (page := run.directory / PAGE).exists():
        parts.append(Text(f"in a browser: {page.as_uri()}", style="dim"))
    return Group(*parts)


def comparison_view(one: RecordedRun, other: RecordedRun) -> RenderableType:
    """Returns a table with the results of both runs, and a table with the settings that differ."""
    results, settings = compare(one, other)
    names = (one.name, other.name)
    parts: list[RenderableType] = [_rows("result", names, results)]
    if settings:
        parts += [Text(), _rows("setting", names, settings)]
    else:
        parts += [Text(), Text("both runs have the same settings", style="dim")]
    return Group(*parts)


def finished_line(run: RecordedRun) -> str:
    """Returns a line with the name and the end time of a past run."""
    if run.end is None:
        return f"run {run.name}: {run.outcome}"
    return (
        f"run {run.name} has ended: {run.end.outcome} at "
        f"{_local(run.end.ended_unix_s):%Y-%m-%d %H:%M:%S}"
    )


def run_json(run: RecordedRun) -> dict[str, Any]:
    """Returns a run as a JSON-compatible dictionary. Unknown values are null."""
    content = {"run": run.name, "outcome": run.outcome, "took_s": run.took_s, **asdict(run)}
    del content["pid_start_ticks"]
    content["directory"] = str(run.directory)
    return content


def comparison_json(one: RecordedRun, other: RecordedRun) -> dict[str, Any]:
    """Returns both runs as a JSON-compatible dictionary, with the names of the values that
    differ."""
    rows = [row.name for part in compare(one, other) for row in part if row.differs]
    return {"runs": [run_json(one), run_json(other)], "differs": rows}


def finished_json(run: RecordedRun) -> dict[str, Any]:
    """Returns a finished run as a JSON-compatible dictionary, with the keys of `shoal status
    --json`."""
    end = run.end
    return {
        "job_id": run.job_id,
        "run": end.run if end is not None else None,
        "phase": "finished",
        "ending": run.outcome,
        "ending_reason": (end.reason or None) if end is not None else None,
        "ended_unix_ms": None if end is None else round(end.ended_unix_s * 1000),
        "world_size": end.ranks if end is not None else None,
        "members": [],
        "servers": [],
        "history": run_json(run),
    }


def _headline(run: RecordedRun, now: datetime) -> Text:
    text = Text.assemble((f"run {run.name}", "bold"), "  ", _outcome(run))
    if run.end is not None:
        ended = datetime.fromtimestamp(run.end.ended_unix_s, UTC)
        text.append(
            f" at {_local(run.end.ended_unix_s):%Y-%m-%d %H:%M:%S}, {_whole(now - ended)} ago, "
            f"after {_took(run)}"
        )
    else:
        text.append(f", began at {_local(run.started_unix_s):%Y-%m-%d %H:%M:%S}")
    return text


def _last_step(end: RunEnd | None) -> str:
    """Returns the number of the last committed step as text. For a run that did not complete, adds
    the total number of steps, if it is known."""
    if end is None or not end.last_step:
        return _NOTHING  # a run that resumed from a checkpoint has steps, but took none
    unfinished = end.outcome is not Outcome.COMPLETED and end.steps_in_all > end.last_step
    return f"{end.last_step:,}" + (f" of {end.steps_in_all:,}" if unfinished else "")


def _worker_table(end: RunEnd) -> FittingTable:
    workers = sorted(end.workers, key=lambda worker: (worker.replaced, worker.rank))
    return FittingTable(
        Column("rank", [str(worker.rank) for worker in workers]),
        Column("host", [worker.host for worker in workers], dispensable=1, right=False),
        Column("pid", [str(worker.pid) for worker in workers]),
        Column("step", [f"{worker.steps:,}" if worker.steps else _NOTHING for worker in workers]),
        Column("loss", [_significant(worker.loss) for worker in workers]),
        Column(
            "ended with",
            [f"{worker.ended}{', replaced' * worker.replaced}" for worker in workers],
            right=False,
        ),
    )


def _rows(title: str, names: tuple[str, str], rows: Sequence[Row]) -> FittingTable:
    def styled(row: Row, value: str) -> Text:
        return Text(value, style="bold" if row.differs else "dim")

    columns = [
        Column(title, [Text(row.name) for row in rows], right=False),
        Column(names[0], [styled(row, row.values[0]) for row in rows]),
        Column(names[1], [styled(row, row.values[1]) for row in rows]),
    ]
    if any(row.change for row in rows):
        columns.append(Column("change", [row.change for row in rows]))
    return FittingTable(*columns)


def _outcome(run: RecordedRun) -> Text:
    return Text(run.outcome, style=_STYLES[run.outcome])


def _arguments(run: RecordedRun) -> str:
    text = shlex.join(run.arguments)
    return text if len(text) <= _LONGEST_ARGUMENTS else f"{text[: _LONGEST_ARGUMENTS - 1]}…"


def _command(run: RecordedRun) -> str:
    return shlex.join([run.program, *run.arguments])


def _took(run: RecordedRun) -> str:
    return _NOTHING if run.took_s is None else str(_whole(timedelta(seconds=run.took_s)))


def _significant(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.4g}"


def _whole(duration: timedelta) -> timedelta:
    return timedelta(seconds=max(0, round(duration.total_seconds())))


def _local(unix_s: float) -> datetime:
    return datetime.fromtimestamp(unix_s, UTC).astimezone()
