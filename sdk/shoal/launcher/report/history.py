"""Past runs on disk. Each run has a directory below its job's directory, where its launcher records
what it knows. Submitted runs (`launcher.run.submissions`) use the same directories.

    run.json       the command, its process, and how the run ended
    events.jsonl   the coordinator's events of the run
    course.json    the run's figures, points and pauses, used to draw a plot
    page.html      the status page, with its data
    output.log     the output of launcher and workers; older output is in output.1.log

Reading the history does not require a running process of Shoal. The directories have mode 0700.
There is no index; directories are listed each time, so any number of launchers may write at the
same time.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

from shoal_common.errors import ConfigurationError, UnknownResourceError

from shoal.launcher.clusters.registry import home_directory
from shoal.launcher.processes.process import start_ticks
from shoal.launcher.report.account import Pause, RunFigures
from shoal.launcher.report.changes import Change
from shoal.launcher.report.course import Point, Standstill

RECORD: Final = "run.json"
EVENTS: Final = "events.jsonl"
COURSE: Final = "course.json"
PAGE: Final = "page.html"
LOG: Final = "output.log"
OLDER_LOG: Final = "output.1.log"
_SUBMISSION: Final = "submission.json"
_RESULT: Final = "result.json"
_FORMAT: Final = 1
_RUNS: Final = 100
_MIB: Final = 1024
_HALF_MADE_S: Final = 3600.0
"""Age in seconds up to which a directory without a record may belong to a run that is just
starting."""


class Outcome(StrEnum):
    """Outcome of a run, named as in the output of other commands."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    """The run was asked to stop before its script finished."""
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """The run ended early: its launcher was asked to exit, or its workers were drained or
    evicted."""
    KILLED = "killed"
    """The launcher was killed, so the end of the run was not recorded."""
    RUNNING = "running"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the history. When a run starts, the oldest finished runs beyond the limits are
    removed."""

    runs: int = _RUNS
    """Maximum number of finished runs that are kept; 0: nothing is recorded."""
    nbytes: int = _MIB << 20
    """Maximum total size of the finished runs in bytes. The newest run is kept even if it is
    larger."""

    @classmethod
    def load(cls, environment: Mapping[str, str]) -> Self:
        """Reads SHOAL_HISTORY_RUNS and SHOAL_HISTORY_MIB. Raises ConfigurationError."""
        runs = _number(environment, "SHOAL_HISTORY_RUNS", _RUNS)
        return cls(runs=runs, nbytes=_number(environment, "SHOAL_HISTORY_MIB", _MIB) << 20)


@dataclass(frozen=True, kw_only=True)
class WorkerEnd:
    """Record of the exit of one of this launcher's workers."""

    rank: int
    host: str
    pid: int
    ended: str
    """Exit of the process: `exit code 0`, `SIGKILL`, ..."""
    steps: int
    """Number of committed steps of the run when the worker exited; 0 if the worker did not commit
    any."""
    loss: float | None
    replaced: bool = False
    """True if the launcher started another process in place of this one."""


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """Record of the end of a run, with its final counts as in `RunFigures`. Unknown numbers are
    None."""

    ended_unix_s: float
    exit_status: int
    outcome: Outcome
    reason: str
    """Human-readable reason for the outcome; may be empty."""
    run: int
    """Number of the run within its job, assigned by the coordinator; 0 if unknown."""
    strategy: str
    """Name of the strategy; empty if the script never called `as_distributed`."""
    ranks: int
    """Largest number of ranks during the run; for a script without Shoal, the number of started
    workers."""
    steps: int
    last_step: int
    steps_in_all: int
    samples: int
    seconds: float
    samples_per_s: float
    faults: int
    joins: int
    leaves: int
    pauses: int
    paused_s: float
    lost_s: float
    loss: float | None
    metrics: Mapping[str, float]
    workers: tuple[WorkerEnd, ...]


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """One run in the history."""

    job_id: str
    number: int
    """Number of the run in the history, counted per job id from 1."""
    program: str
    arguments: tuple[str, ...]
    """Arguments of the script."""
    settings: Mapping[str, str]
    """Settings of the run that are compared by `shoal history`."""
    host: str
    pid: int
    pid_start_ticks: int
    started_unix_s: float
    end: RunEnd | None
    """Record of the end of the run. None while the run is in progress, or if its launcher was
    killed."""
    directory: Path

    @property
    def name(self) -> str:
        """Name of the run in commands: JOB/NUMBER."""
        return f"{self.job_id}/{self.number}"

    @property
    def outcome(self) -> Outcome:
        if self.end is not None:
            return self.end.outcome
        return (
            Outcome.RUNNING
            if _lives(self.host, self.pid, self.pid_start_ticks)
            else (Outcome.KILLED)
        )

    @property
    def took_s(self) -> float | None:
        """Seconds between the launcher's start and its exit. None if the run has not ended, or its
        launcher was killed."""
        return None if self.end is None else self.end.ended_unix_s - self.started_unix_s

    def figures(self) -> RunFigures:
        """Reads the run's figures with all points. Raises UnknownResourceError if they were not
        recorded."""
        return course_of(json.loads(self._content(COURSE, "figures")))

    def events(self) -> list[dict[str, Any]]:
        """Reads the run's events, oldest first, each a `shoal.v1.Event` in protobuf's JSON form.
        Raises UnknownResourceError."""
        return [json.loads(line) for line in self._content(EVENTS, "events").splitlines()]

    def log_lines(self) -> Iterator[str]:
        """Yields the lines of the run's output, without line breaks. Raises
        UnknownResourceError."""
        files = [file for name in (OLDER_LOG, LOG) if (file := self.directory / name).exists()]
        if not files:
            raise self._missing("output")
        for file in files:
            with file.open(encoding="utf-8", errors="replace", newline="\n") as lines:
                for line in lines:
                    yield line.rstrip("\r\n")

    def _content(self, name: str, what: str) -> str:
        try:
            return (self.directory / name).read_text(encoding="utf-8")
        except OSError:
            raise self._missing(what) from None

    def _missing(self, what: str) -> UnknownResourceError:
        why = {
            Outcome.RUNNING: "it has not ended",
            Outcome.KILLED: "its launcher was killed before it could write them",
        }.get(self.outcome, "the coordinator did not respond when it ended, or nothing was trained")
        return UnknownResourceError(
            f"the history has no {what} of run {self.name}: {why}", reason="HISTORY_UNKNOWN"
        )


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """A run in the history whose record cannot be read."""

    directory: Path
    why: str


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Size and age of a run's directory, as input for `to_remove`."""

    directory: Path
    unix_s: float
    """Time at which the run started."""
    nbytes: int
    ended: bool


def to_remove(stored: Iterable[Stored], limits: Limits) -> list[Stored]:
    """Returns the runs to remove: the oldest finished runs beyond the limits. Runs in progress do
    not count towards the limits and are not removed. Pure."""
    ended = sorted((each for each in stored if each.ended), key=lambda each: -each.unix_s)
    kept = total = 0
    for each in ended[: limits.runs]:
        total += each.nbytes
        if kept and total > limits.nbytes:
            break
        kept += 1
    return ended[kept:]


def history_directory(environment: Mapping[str, str] | None = None) -> Path:
    """Returns the directory of the history: $XDG_STATE_HOME/shoal/jobs, otherwise
    ~/.local/state/shoal/jobs. It persists when the user logs out.

    Raises ConfigurationError if there is no home directory.
    """
    environment = os.environ if environment is None else environment
    if state := environment.get("XDG_STATE_HOME"):
        return Path(state) / "shoal" / "jobs"
    return home_directory("XDG_STATE_HOME") / ".local" / "state" / "shoal" / "jobs"


class History:
    """Past runs of this user. It keeps no state in memory, so all processes see the same runs."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or history_directory()

    def all(self, job_id: str | None = None) -> list[RecordedRun | Unreadable]:
        """Returns all runs (of a job, if `job_id` is given), newest first, followed by runs whose
        records cannot be read."""
        found, unreadable = [], []
        for directory in self._directories(job_id):
            try:
                found.append(_read(directory))
            except FileNotFoundError:
                continue  # the run is being removed, or was submitted but never started
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                unreadable.append(Unreadable(directory=directory, why=_described(error)))
        return [*sorted(found, key=lambda run: -run.started_unix_s), *unreadable]

    def newest(self, job_id: str | None = None) -> RecordedRun | None:
        """Returns the run that was started last (of a job, if `job_id` is given); None if there is
        none."""
        runs = self.all(job_id)
        return runs[0] if runs and isinstance(runs[0], RecordedRun) else None

    def find(self, name: str) -> RecordedRun:
        """Returns a run by its name, `JOB/NUMBER`, or the newest run of a job. Raises
        UnknownResourceError."""
        job_id, _, number = name.partition("/")
        runs = [run for run in self.all(job_id) if isinstance(run, RecordedRun)]
        for run in runs:
            if not number or number == str(run.number):
                return run
        there = (
            f"this job has {', '.join(run.name for run in runs[:5])}"
            if runs
            else "`shoal history` lists the recorded runs"
        )
        raise UnknownResourceError(
            f"the history has no run {name!r}: {there}", reason="HISTORY_UNKNOWN"
        )

    def make_directory(self, job_id: str) -> Path:
        """Creates the directory for the job's next run. Raises OSError."""
        folder = self._directory / job_id
        while True:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            numbers = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
            own = folder / str(1 + max(numbers, default=0))
            try:
                own.mkdir(mode=0o700)
            except (FileExistsError, FileNotFoundError):
                # another launcher has taken this number or has removed the job's empty directory
                continue
            return own

    def own_submission(self, job_id: str) -> Path | None:
        """Returns the directory of the submission that this process executes; None if it was not
        submitted."""
        own = (socket.gethostname(), os.getpid(), start_ticks(os.getpid()))
        for directory in self._directories(job_id):
            record = _loaded(directory / _SUBMISSION)
            if (
                record
                and (record.get("host"), record.get("pid"), record.get("pid_start_ticks")) == own
            ):
                return directory
        return None

    def prune(self, limits: Limits) -> None:
        """Removes the oldest finished runs beyond the limits. Never raises an error: a run that
        cannot be removed is kept."""
        stored = [each for directory in self._directories() if (each := _stored(directory))]
        for each in to_remove(stored, limits):
            shutil.rmtree(each.directory, ignore_errors=True)
            folder = each.directory.parent
            try:  # removes the job's directory unless it contains other runs
                if [path.name for path in folder.iterdir()] in ([], [".lock"]):
                    (folder / ".lock").unlink(missing_ok=True)
                    folder.rmdir()
            except OSError:
                continue

    def _directories(self, job_id: str | None = None) -> list[Path]:
        try:
            folders = [self._directory / job_id] if job_id else [*self._directory.iterdir()]
            return [
                path
                for folder in folders
                if folder.is_dir()
                for path in folder.iterdir()
                if path.name.isdecimal()
            ]
        except OSError:
            return []


def write_run(run: RecordedRun) -> None:
    """Writes the record of a run atomically. Raises OSError."""
    content = {**asdict(run), "format": _FORMAT}
    del content["directory"], content["number"]
    temporary = run.directory / f"{RECORD}.new"
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.rename(run.directory / RECORD)


def course_of(content: Mapping[str, Any]) -> RunFigures:
    """Restores figures from the JSON form of `dataclasses.asdict`."""
    pauses = tuple(
        Pause(
            standstill=Standstill(**pause["standstill"]),
            changes=tuple(_change(change) for change in pause["changes"]),
        )
        for pause in content["pauses"]
    )
    points = tuple(Point(**point) for point in content["points"])
    return RunFigures(**{**content, "pauses": pauses, "points": points})


def _change(content: Mapping[str, Any]) -> Change:
    lists: dict[str, Any] = {
        name: tuple(value) for name, value in content.items() if isinstance(value, list)
    }
    return Change(**{**content, **lists})


def _read(directory: Path) -> RecordedRun:
    content = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    if (version := content.pop("format", None)) != _FORMAT:
        raise ValueError(f"it has format {version}, written by another release; expected {_FORMAT}")
    end = content.pop("end")
    if end is not None:
        workers = tuple(WorkerEnd(**each) for each in end.pop("workers"))
        end = RunEnd(**{**end, "outcome": Outcome(end["outcome"]), "workers": workers})
    content["arguments"] = tuple(content["arguments"])
    return RecordedRun(**content, end=end, number=int(directory.name), directory=directory)


def _stored(directory: Path) -> Stored | None:
    """Returns the size and age of a run's directory; None if it is being removed."""
    try:
        status, sizes = directory.stat(), [path.lstat().st_size for path in directory.iterdir()]
    except OSError:
        return None
    record = _loaded(directory / RECORD) or _loaded(directory / _SUBMISSION)
    began: object = None
    if record is None:
        ended = time.time() - status.st_mtime > _HALF_MADE_S
    else:
        lives = _lives(record.get("host"), record.get("pid"), record.get("pid_start_ticks"))
        is_over = bool(record.get("end")) or (directory / _RESULT).exists()
        # a process on a different machine cannot be checked from here
        elsewhere = record.get("host") != socket.gethostname()
        ended = is_over if elsewhere else not lives
        began = record.get("started_unix_s")
    unix_s = began if isinstance(began, int | float) else status.st_mtime
    return Stored(directory=directory, unix_s=unix_s, nbytes=sum(sizes), ended=ended)


def _loaded(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _lives(host: object, pid: object, ticks: object) -> bool:
    """Returns whether a process exists. Returns True for a process on a different machine, which
    cannot be checked."""
    if host != socket.gethostname():
        return True
    return isinstance(pid, int) and ticks is not None and start_ticks(pid) == ticks


def _described(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if (text and not text.isascii()) or not (text or "0").isdecimal():
        raise ConfigurationError(f"{name}={text!r}: expected a whole number, 0 or more")
    return int(text) if text else default
