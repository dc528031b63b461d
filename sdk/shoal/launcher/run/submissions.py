"""Starts runs in the background and reads their output and results. Both are in files, so any
process of this user on this host can follow a run
(docs/explanation/launcher-and-deployment.md#batch-systems).

Each run has a directory below the directory of its job: `submission.json` describes the command and
its process, `output.log` contains all output, and `result.json` the outcome. The launcher's process
writes the result itself (`shoal.cli.submitted`), so a killed launcher leaves no result.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from shoal_common.errors import (
    ConfigurationError,
    DeadlineError,
    PreconditionError,
    UnavailableError,
    UnknownResourceError,
)

from shoal.launcher.clusters.jobs import check_job_id, is_job_id
from shoal.launcher.processes.members import kill_workers
from shoal.launcher.processes.process import Handle, start_ticks
from shoal.launcher.report.history import LOG, History, Limits, history_directory

_FORMAT: Final = 1
_RECORD: Final = "submission.json"
_RESULT: Final = "result.json"
_KILL_TIMEOUT: Final = timedelta(seconds=30)
_KILL_INTERVAL: Final = timedelta(seconds=0.25)
_START_TIMEOUT: Final = timedelta(seconds=30)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A run started in the background."""

    job_id: str
    run: int
    """Number of the submission, counted per job id on this host from 1."""
    arguments: tuple[str, ...]
    """Arguments of the command, after `shoal run`."""
    coordinator: str | None
    """Address of a shared coordinator (host:port); None: the run has its own coordinator."""
    host: str
    pid: int
    """Process id of the launcher."""
    pid_start_ticks: int
    """Start time of the process. Together with the pid, it identifies the process uniquely."""
    started_unix_s: float
    directory: Path

    @property
    def log(self) -> Path:
        """File with the output of launcher and workers."""
        return self.directory / LOG

    @property
    def is_running(self) -> bool:
        """True if the launcher's process exists. It may already have recorded its outcome."""
        return start_ticks(self.pid) == self.pid_start_ticks

    @property
    def has_ended(self) -> bool:
        """True if no process of the submission is running. Its log is then complete."""
        return self.outcome() is not None

    def outcome(self) -> Outcome | None:
        """Returns the outcome of the submission; None while it is running. If the launcher was
        killed, the outcome has no exit status."""
        # must be read before the result, since a launcher writes its result before it exits
        running = self.is_running
        content = _read(self.directory / _RESULT)
        if content is not None:
            return Outcome(
                exit_status=int(content["exit_status"]),
                summary=content["summary"],
                ended_unix_s=content["ended_unix_s"],
            )
        if running:
            return None
        return Outcome(
            exit_status=None,
            summary=f"the launcher of job {self.job_id} (pid {self.pid}) is gone and left no "
            "result: it was killed, or the machine was "
            f"restarted; its output is in {self.log}",
            ended_unix_s=None,
        )

    def kill(self) -> None:
        """Kills the launcher and its workers immediately, and returns when the launcher has exited.
        Does nothing if it has already exited.

        Raises:
            PreconditionError: PROCESS_NOT_OURS: the process belongs to a different user.
            DeadlineError: the process does not exit in time.
        """
        try:
            process = Handle(self.pid)
        except ProcessLookupError:
            return
        try:
            if not self.is_running:
                return  # a different process has this pid by now
            # after this signal, the launcher does not start replacement workers
            process.send(signal.SIGTERM)
            for _ in range(round(_KILL_TIMEOUT / _KILL_INTERVAL)):
                if process.wait(_KILL_INTERVAL):
                    return
                kill_workers(self.pid)
            process.kill()  # the kernel then kills everything that the launcher started
            if not process.wait(_KILL_TIMEOUT):
                raise DeadlineError(
                    f"the launcher of job {self.job_id} (pid {self.pid}) is still running after "
                    "SIGKILL"
                )
        except PermissionError as error:
            raise PreconditionError(
                f"cannot kill the launcher of job {self.job_id} (pid {self.pid}): {error}",
                reason="PROCESS_NOT_OURS",
            ) from error
        finally:
            process.close()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a background run."""

    exit_status: int | None
    """Exit status of the launcher; None if unknown."""
    summary: str
    ended_unix_s: float | None


class Submissions:
    """Submissions of this user on this host. It keeps no state in memory, so all processes see the
    same submissions."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or history_directory()
        self._history = History(self._directory)

    def submit(
        self,
        job_id: str,
        arguments: Sequence[str],
        *,
        coordinator: str | None,
        environment: Mapping[str, str],
        directory: Path | None = None,
    ) -> Submission:
        """Starts `shoal run ARGUMENTS` in its own session, and returns once its process exists. The
        arguments must name `job_id`.

        Args:
            directory: working directory; None: the current one.

        Raises:
            ConfigurationError: the id is invalid.
            PreconditionError: JOB_RUNNING: the job's last submission is still running.
            UnavailableError: SUBMIT_FAILED: the process could not be started.
        """
        check_job_id(job_id)
        folder = self._directory / job_id
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigurationError(
                f"cannot record job {job_id!r} in {folder}: {error.strerror}; set XDG_STATE_HOME "
                "to a writable directory"
            ) from error
        with _locked(folder):
            last = self._newest(folder)
            if last is not None and not last.has_ended:
                raise PreconditionError(
                    f"job {job_id!r} is already running on this machine (its launcher has pid "
                    f"{last.pid}); wait for it, stop it, or use another id",
                    reason="JOB_RUNNING",
                )
            own = self._history.make_directory(job_id)
            run = int(own.name)
            _start(
                own,
                arguments,
                environment,
                directory,
                {"job_id": job_id, "run": run, "coordinator": coordinator},
            )
            started = self._newest(folder)
        self._history.prune(Limits.load(os.environ))
        if started is None or started.run != run:
            raise UnavailableError(
                f"job {job_id!r} was started, but its record {own / _RECORD} is missing; it "
                "may have been removed",
                reason="SUBMIT_FAILED",
            )
        return started

    def newest(self, job_id: str) -> Submission:
        """Returns the last submission of a job. Raises UnknownResourceError
        (SUBMISSION_UNKNOWN)."""
        found = self._newest(self._directory / job_id) if is_job_id(job_id) else None
        if found is None:
            raise UnknownResourceError(
                f"you have not submitted job {job_id!r} on this machine; submit it with "
                "shoal.Client().submit(...) or `shoal submit`",
                reason="SUBMISSION_UNKNOWN",
            )
        return found

    def all(self) -> list[Submission]:
        """Returns the last submission of each job, newest first."""
        folders = self._directory.iterdir() if self._directory.is_dir() else ()
        found = [
            each
            for folder in folders
            if folder.is_dir() and (each := self._newest(folder)) is not None
        ]
        return sorted(found, key=lambda each: each.started_unix_s, reverse=True)

    def _newest(self, folder: Path) -> Submission | None:
        return max(self._runs(folder), key=lambda each: each.run, default=None)

    def _runs(self, folder: Path) -> Iterator[Submission]:
        if not folder.is_dir():
            return
        for path in folder.iterdir():
            content = _read(path / _RECORD)
            if content is not None and content.get("host") == socket.gethostname():
                yield Submission(
                    **{**content, "arguments": tuple(content["arguments"])}, directory=path
                )


def write_record(directory: Path, *, pid: int, started_unix_s: float, **known: Any) -> None:
    """Writes the record of a submission. Called by the process that starts the launcher, once the
    launcher exists."""
    record = {
        **known,
        "host": socket.gethostname(),
        "pid": pid,
        "pid_start_ticks": start_ticks(pid) or 0,
        "started_unix_s": started_unix_s,
    }
    _write(directory / _RECORD, record)


def write_outcome(directory: Path, outcome: Outcome) -> None:
    """Writes the outcome of a submission. Called by the launcher's process before it exits."""
    _write(directory / _RESULT, asdict(outcome))


def log_of(directory: Path) -> Path:
    """Returns the path of a submission's output file."""
    return directory / LOG


def _start(
    own: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: Path | None,
    known: Mapping[str, Any],
) -> None:
    """Starts a launcher and blocks until its process exists. To do so, starts a process that forks
    the launcher and exits immediately."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "shoal.cli.submitted",
        str(own.absolute()),
        json.dumps(known),
        *arguments,
    ]
    if directory is not None and not directory.is_dir():
        raise ConfigurationError(f"directory={str(directory)!r} does not exist")
    try:
        with log_of(own).open("ab") as log:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                cwd=directory,
                timeout=_START_TIMEOUT.total_seconds(),
                check=True,
            )
    except (subprocess.SubprocessError, OSError) as error:
        said = log_of(own).read_text(errors="replace").strip()[-500:]
        raise UnavailableError(
            f"could not start {' '.join(command[:4])}: {error}; its output: {said}",
            reason="SUBMIT_FAILED",
        ) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Serializes submissions of a job across processes."""
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({"format": _FORMAT, **content}))
    temporary.rename(path)


def _read(path: Path) -> dict[str, Any] | None:
    """Reads a JSON file. Returns None if it does not exist or was written by a different
    release."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError, AttributeError):
        content: dict[str, Any] = json.loads(path.read_text())
        if content.pop("format", None) == _FORMAT:
            return content
    return None
