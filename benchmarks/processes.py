"""Starts the measured programs as separate processes, and leaves none of them behind. This module
measures nothing.

A `Stage` is the set of processes of one run. They inherit a mark in their environment, so that the
stage also finds processes whose parent has died. A stage belongs to the thread that created it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from benchmarks.errors import MeasurementError

REPOSITORY: Final = Path(__file__).resolve().parent.parent
STAGE_PREFIX: Final = "shoal-bench-"
_MARK: Final = "SHOAL_BENCHMARK_STAGE"
_POLL_S: Final = 0.02
_KILL_DEADLINE_S: Final = 10.0
_OUTPUT_SHOWN: Final = 2000


class Stage:
    """The processes of one run, and its temporary directory. A context manager that stops the
    processes and removes the directory on exit."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix=STAGE_PREFIX)
        self.directory = Path(self._temporary.name)
        self._mark = uuid.uuid4().hex
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._expendable: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop(grace_s=5.0)
        finally:
            self._temporary.cleanup()

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        expendable: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Starts `command` in the root of the repository, with its output in a file. As with
        torchrun, the process computes with one thread (OMP_NUM_THREADS=1).

        Args:
            name: name of the output file; several processes may share one.
            command: program and arguments.
            environment: variables to set in addition to those of this process.
            expendable: True if the process may be killed as part of the measurement.
        """
        with self._output(name).open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    **(environment or {}),
                    _MARK: self._mark,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append((name, process))
        if expendable:
            self._expendable.add(process.pid)
        return process

    def wait_until(self, what: str, condition: Callable[[], bool], *, timeout_s: float) -> None:
        """Waits until `condition` returns True. Polls 50 times a second, which is rare enough not
        to disturb the measurement.

        Raises:
            MeasurementError: the condition was not met within `timeout_s`, or a process that is not
                expendable failed. The message names the condition as `what`.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise MeasurementError(f"{what}: not within {timeout_s:g} s\n{self.outputs()}")
            self._check_running(what)
            time.sleep(_POLL_S)

    def finish(self, process: subprocess.Popen[bytes], *, timeout_s: float) -> None:
        """Waits until `process` has exited with status 0. Raises MeasurementError if it fails or
        does not exit in time."""
        if code := self.await_end(process, timeout_s=timeout_s):
            raise MeasurementError(f"{_named(process)} ended with {code}\n{self.outputs()}")

    def await_end(self, process: subprocess.Popen[bytes], *, timeout_s: float) -> int:
        """Waits until `process` has exited, and returns its exit code. Raises MeasurementError if
        it does not exit in time."""
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise MeasurementError(
                f"{_named(process)} did not end within {timeout_s:g} s\n{self.outputs()}"
            ) from None

    def stop(self, *, grace_s: float) -> None:
        """Sends SIGTERM to the processes started by `start` and, after `grace_s`, SIGKILL to all
        remaining processes of the stage, including those whose parent has died."""
        running = [process for _, process in self._started if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        left = self._marked()
        for orphan in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()
        for _, process in self._started:
            process.wait(_KILL_DEADLINE_S)
        _, alive = psutil.wait_procs(left, timeout=_KILL_DEADLINE_S)
        self._started.clear()
        if alive:
            raise MeasurementError(
                f"still there after SIGKILL: {[process.pid for process in alive]}"
            )

    def processes(self) -> list[psutil.Process]:
        """Returns all running processes of the stage, including those that were started by other
        processes of the stage."""
        return self._marked()

    def outputs(self) -> str:
        """Returns the end of each process's output, for error messages."""
        return "\n".join(
            f"--- {name}\n{text.strip()[-_OUTPUT_SHOWN:]}" for name, text in self.texts().items()
        )

    def texts(self) -> dict[str, str]:
        """Returns the complete output so far, by name of the output file."""
        return {
            file.stem: file.read_text(errors="replace")
            for file in sorted(self.directory.glob("*.out"))
        }

    def _output(self, name: str) -> Path:
        return self.directory / f"{name}.out"

    def _check_running(self, what: str) -> None:
        for name, process in self._started:
            code = process.poll() or 0
            if code > 0 or (code < 0 and process.pid not in self._expendable):
                raise MeasurementError(
                    f"{what}: {name} ended with {code} meanwhile\n{self.outputs()}"
                )

    def _marked(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark:
                    found.append(process)
        return found


def _named(process: subprocess.Popen[bytes]) -> str:
    return (
        " ".join(str(word) for word in process.args)
        if isinstance(process.args, (list, tuple))
        else str(process.args)
    )
