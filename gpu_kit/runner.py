"""Runs stages one after the other and records their results. Each stage has a time limit, and so
does the entire run.

Stages write directly to their output files. If the run is cut off, the results of finished stages
and the output of the current stage so far are therefore preserved. A stage that exceeds its limit
gets SIGINT, so that pytest reports its results so far, and then SIGKILL. All processes of a stage
are killed when it ends, even those in other sessions or without a parent. Imports only the standard
library.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SUMMARY: Final = "summary.txt"
_MARK: Final = "SHOAL_GPU_KIT_STAGE"
_WORTH_STARTING_S: Final = 10.0
_RESERVE_S: Final = 6.0
"""Time kept in reserve at the end, to stop the last stage and write the summary."""
_REPORT_GRACE_S: Final = 5.0
_NOTABLE: Final = re.compile(
    r"(=+ .*(passed|failed|error|skipped).*=+$|FAILED |ERROR |FIGURE |MISSING )"
)
_SHOWN: Final = 40
_SHOWN_WIDTH: Final = 260
_POLL_S: Final = 0.05
_NOT_STARTED: Final = 127


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A command with a time limit and an output file."""

    name: str
    file: str
    """Name of the output file; several stages may share one."""
    limit_s: float
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: str | None = None
    """Name of an earlier stage. If that stage failed in this run, this stage is skipped."""
    essential: bool = False
    """True if the run ends when this stage fails."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a stage."""

    stage: str
    status: int | None
    """Exit status; None if the stage did not end within its time limit."""
    seconds: float

    @property
    def well(self) -> bool:
        """True if the stage exited with status 0."""
        return self.status == 0


class Runner:
    """Runs the stages of one run. Belongs to the thread that created it."""

    def __init__(self, output: Path, *, limit_s: float, directory: Path) -> None:
        """Starts the clock of the run.

        Args:
            output: folder for the output files and the summary.
            limit_s: time limit of all stages together, in seconds from now.
            directory: working directory of the commands.
        """
        output.mkdir(parents=True, exist_ok=True)
        self._output = output
        self._directory = directory
        self._begun = time.monotonic()
        self._limit_s = limit_s
        self._summary = output / SUMMARY
        self.outcomes: list[Outcome] = []

    def run(self, stages: Iterable[Stage]) -> bool:
        """Runs the stages in order. Returns whether all of them ran and exited with status 0."""
        complete = True
        for stage in stages:
            reason = self._left_out(stage)
            if reason is not None:
                self._say(f"left out  {stage.name}: {reason}")
                complete = False
                continue
            outcome = self._run(stage)
            self.outcomes.append(outcome)
            complete = complete and outcome.well
            if stage.essential and not outcome.well:
                self._say(f"stopped   nothing can run without {stage.name}: see {stage.file}")
                return False
        self._say(f"finished  {self._left_s():.0f} s were left")
        return complete

    def _left_out(self, stage: Stage) -> str | None:
        if self._left_s() < _WORTH_STARTING_S:
            return f"only {max(0.0, self._left_s()):.0f} s are left"
        if any(outcome.stage == stage.needs and not outcome.well for outcome in self.outcomes):
            return f"{stage.needs} failed"
        return None

    def _run(self, stage: Stage) -> Outcome:
        limit_s = min(stage.limit_s, self._left_s())
        self._say(f"started   {stage.name}, for at most {limit_s:.0f} s, into {stage.file}")
        file, mark, begun = self._output / stage.file, uuid.uuid4().hex, time.monotonic()
        with file.open("ab") as output:
            output.write(f"\n===== {stage.name}: {' '.join(stage.command)}\n".encode())
            output.flush()
            start = output.tell()
            environment = {**os.environ, "PYTHONUNBUFFERED": "1", **stage.environment, _MARK: mark}
            try:
                process = subprocess.Popen(
                    stage.command,
                    cwd=self._directory,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                status = _wait(process, limit_s)
            except OSError as error:
                output.write(f"{error}\n".encode())
                status = _NOT_STARTED
            finally:
                _end_marked(mark)
        outcome = Outcome(stage=stage.name, status=status, seconds=time.monotonic() - begun)
        ended = "its limit, and was killed" if status is None else f"status {status}"
        self._say(
            f"ended     {stage.name} with {ended} after {outcome.seconds:.0f} s",
            *_excerpt(file, start, well=outcome.well),
        )
        return outcome

    def _left_s(self) -> float:
        return self._limit_s - _RESERVE_S - (time.monotonic() - self._begun)

    def _say(self, line: str, *details: str) -> None:
        now_s = time.monotonic() - self._begun
        text = "\n".join([f"{now_s:4.0f} s  {line}", *(f"          {each}" for each in details)])
        print(text, flush=True)
        with self._summary.open("a") as summary:
            summary.write(f"{text}\n")


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Waits for a process. Returns its exit status, or None if its process group was interrupted or
    killed at the time limit."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(limit_s)
    for number, grace_s in ((signal.SIGINT, _REPORT_GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
            return None
    return None


def _end_marked(mark: str) -> None:
    """Kills all processes with the stage's mark in their environment, until none is left or a few
    seconds have passed."""
    deadline = time.monotonic() + _REPORT_GRACE_S
    while (left := _marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _marked(mark: str) -> list[int]:
    needle, found = f"{_MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def _excerpt(file: Path, start: int, *, well: bool) -> list[str]:
    """Returns the lines of a stage's output to include in the summary: results and failures, and
    the last lines if the stage failed. `start`: position in the file at which its output begins."""
    with file.open("rb") as output:
        output.seek(start)
        lines = output.read().decode(errors="replace").splitlines()
    notable = [line for line in lines if _NOTABLE.match(line)][-_SHOWN:]
    end = [] if well else [f"| {line}" for line in lines[-4:] if line not in notable]
    return [line[:_SHOWN_WIDTH] for line in (*notable, *end)]
