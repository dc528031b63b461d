"""Records a run for the history (`launcher.report.history`), while it is in progress and when it
ends.

The recorder makes no decisions. A failure to write a record does not fail the run; only the first
failure is reported to the user.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self

from shoal_common.errors import ConfigurationError

from shoal.launcher.clusters.jobs import is_job_id
from shoal.launcher.processes.process import start_ticks
from shoal.launcher.report.account import RunFigures
from shoal.launcher.report.course import Course
from shoal.launcher.report.history import (
    COURSE,
    EVENTS,
    LOG,
    OLDER_LOG,
    PAGE,
    History,
    Limits,
    Outcome,
    RecordedRun,
    RunEnd,
    WorkerEnd,
    write_run,
)
from shoal.launcher.workers.output import Stream, Writer
from shoal.launcher.workers.policy import WorkerExit
from shoal.launcher.workers.settings import RunSettings

if TYPE_CHECKING:
    from shoal_protos.v1 import coordinator_pb2 as pb

LOG_BYTES: Final = 16 << 20
"""Size in bytes above which a run's output continues in a new file. At most two files are kept;
older files are removed."""
_MOST_WORKERS: Final = 256
"""Maximum number of exited workers in a record. If there are more, the newest are kept."""
_COLOURED_PREFIX: Final = re.compile(rb"^\x1b\[\d+m(\[\d+\]:)\x1b\[0m ", re.MULTILINE)


class RunRecorder:
    """Recorder of one run. Belongs to the launcher's main thread, except for the writer."""

    def __init__(self, run: RecordedRun, *, keeps_output: bool) -> None:
        """`keeps_output`: True if the recorder must store the run's output, because no other
        process does."""
        self.problems: list[str] = []
        """Messages to the user about problems; at most one."""
        self._run = run
        self._keeps_output = keeps_output
        self._workers: list[tuple[str, WorkerExit]] = []
        self._number = 0
        self._ranks = 0
        self._closed = False
        self._log: _Log | None = None

    @classmethod
    def begin(cls, settings: RunSettings) -> Self | None:
        """Creates the record of a run that this process starts, and removes the oldest records.

        Returns None if the run is not recorded, because SHOAL_HISTORY_RUNS is 0 or the job id is
        invalid. Raises ConfigurationError for an invalid setting. If the directory cannot be
        written, that is noted in `problems`.
        """
        limits = Limits.load(os.environ)
        if not limits.runs or not is_job_id(settings.job_id):
            return None
        try:
            history = History()
            submission = history.own_submission(settings.job_id)
            directory = submission or history.make_directory(settings.job_id)
            recorder = cls(_record(settings, directory), keeps_output=submission is None)
            write_run(recorder._run)
            history.prune(limits)
        except (OSError, ConfigurationError) as error:
            recorder = cls(_record(settings, Path()), keeps_output=False)
            recorder._give_up(error)
        return recorder

    def writer(self, write: Writer) -> Writer:
        """Returns a writer that passes output on to `write` and records it as complete lines, with
        uncolored prefixes."""
        if not self._keeps_output:
            return write
        log = self._log = _Log(self._run.directory)

        def both(stream: Stream, data: bytes) -> None:
            log.write(data)
            write(stream, data)

        return both

    def worker_ended(self, ended: WorkerExit, *, member_id: str) -> None:
        """Records the end of a worker's process."""
        self._workers = [*self._workers, (member_id, ended)][-_MOST_WORKERS:]

    def keep(self, *, events: Sequence[pb.Event], page: str | None, run: int, ranks: int) -> None:
        """Records the coordinator's information about the run at its end.

        `run`: number of the run at the coordinator. `ranks`: largest number of ranks.
        """
        from google.protobuf.json_format import MessageToDict

        self._number, self._ranks = run, ranks
        lines = [
            json.dumps(MessageToDict(event, preserving_proto_field_name=True)) for event in events
        ]
        self._write(EVENTS, "".join(f"{line}\n" for line in lines))
        if page is not None:
            self._write(PAGE, page)

    def end(
        self,
        outcome: Outcome,
        reason: str,
        *,
        exit_status: int,
        figures: RunFigures,
        course: Course,
    ) -> None:
        """Records the end of the run. `reason`: human-readable reason for the outcome; may be
        empty."""
        if self._closed:
            return
        if figures.points:
            self._write(COURSE, json.dumps(asdict(figures)))
        started = int(self._run.settings["workers"])
        end = RunEnd(
            ended_unix_s=time.time(),
            exit_status=exit_status,
            outcome=outcome,
            reason=reason,
            run=self._number,
            strategy=course.strategy,
            ranks=self._ranks or (started if self._workers else 0),
            steps=figures.steps,
            last_step=figures.last_step,
            steps_in_all=figures.steps_in_all,
            samples=figures.samples,
            seconds=figures.seconds,
            samples_per_s=figures.samples_per_s,
            faults=figures.faults,
            joins=figures.joins,
            leaves=figures.leaves,
            pauses=len(figures.pauses),
            paused_s=figures.paused_s,
            lost_s=figures.lost_s,
            loss=_finite(figures.loss),
            metrics=dict(course.metrics) if course.has_begun else {},
            workers=tuple(
                _worker(
                    ended,
                    member_id,
                    course,
                    replaced=any(later.index == ended.index for _, later in self._workers[at:]),
                )
                for at, (member_id, ended) in enumerate(self._workers, start=1)
            ),
        )
        try:
            write_run(replace(self._run, end=end))
        except OSError as failed:
            self._give_up(failed)

    def close(self) -> None:
        """Closes the file of recorded output. Must be called after the last write."""
        if self._log is not None:
            self._log.close()

    def _write(self, name: str, text: str) -> None:
        if self._closed:
            return
        try:
            (self._run.directory / name).write_text(text, encoding="utf-8")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._closed = True
        self.problems = [
            f"this run is not recorded for `shoal history`: {error}; set XDG_STATE_HOME to a "
            "writable directory, or SHOAL_HISTORY_RUNS=0"
        ]


class _Log:
    """Output of a run in two files of limited size. Belongs to the output pump's thread."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOG
        self._older = directory / OLDER_LOG
        self._file: IO[bytes] | None = None
        self._size = 0
        self._failed = False

    def write(self, data: bytes) -> None:
        """Appends the complete lines in `data`. If lines overwrite each other, only the last one is
        kept."""
        lines = b"".join(line for line in data.splitlines(keepends=True) if line.endswith(b"\n"))
        if self._failed or not lines:
            return
        plain = _COLOURED_PREFIX.sub(rb"\1 ", lines)
        try:
            if self._file is not None and self._size + len(plain) > LOG_BYTES:
                self._file.close()
                self._path.replace(self._older)
                self._file, self._size = None, 0
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            self._file.write(plain)
            self._size += len(plain)
        except OSError:
            self._failed = (
                True  # the terminal shows the complete output; only the log lacks some of it
            )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _record(settings: RunSettings, directory: Path) -> RecordedRun:
    command = list(settings.command)
    at = command.index(settings.program) + 1 if settings.program in command else len(command)
    pid = os.getpid()
    return RecordedRun(
        job_id=settings.job_id,
        number=int(directory.name or 0),
        program=settings.program,
        arguments=tuple(command[at:]),
        settings=_settings(settings),
        host=socket.gethostname(),
        pid=pid,
        pid_start_ticks=start_ticks(pid) or 0,
        started_unix_s=time.time(),
        end=None,
        directory=directory,
    )


def _settings(settings: RunSettings) -> Mapping[str, str]:
    """Returns the flags that may differ between two runs, by name. Omits flags that are not set."""
    nodes = settings.nodes
    values: dict[str, Any] = {
        "workers": settings.workers,
        "machines": f"{nodes.least}:{nodes.most}" if nodes.most > 1 else "",
        "min workers": settings.min_workers,
        "coordinator": settings.endpoint,
        "servers": settings.servers,
        "server backups": settings.server_backups,
        "max restarts": settings.max_restarts,
        "log directory": settings.logs.url or settings.logs.directory,
    }
    return {name: str(value) for name, value in values.items() if value or name == "workers"}


def _worker(ended: WorkerExit, member_id: str, course: Course, *, replaced: bool) -> WorkerEnd:
    tally = course.last_of(member_id)
    return WorkerEnd(
        rank=ended.rank,
        host=ended.host,
        pid=ended.pid,
        ended=str(ended.status),
        steps=0 if tally is None else tally.steps,
        loss=None if tally is None else _finite(tally.counts.loss),
        replaced=replaced,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
