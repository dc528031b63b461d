"""A worker's record of its steps, which the benchmark's main process (the harness) can read while
the worker is alive and after it has been killed. Also contains the worker's side of gates.

Each process has a file with one line per committed step, each written by a single `write`. Times
are by CLOCK_MONOTONIC, which all processes of a machine share. The module does not import torch,
because the harness imports it too.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

WARM_UP_STEPS = 5
"""Steps of a block that are not timed, because the ranks leave the gate one after another."""


class Commit(NamedTuple):
    """One committed step of one process."""

    time_ns: int
    group: int
    """Number of the group (an agreed list of members) in which the step was committed. Newer groups
    have higher numbers."""
    world_size: int
    rank: int
    step: int


class StepLog:
    """Writes the step log of this process. With a gate, also blocks the training loop between
    blocks of steps. Used only from the training thread."""

    def __init__(
        self,
        directory: Path,
        *,
        steps: int,
        gate: Path | None,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """Opens the log.

        Args:
            directory: existing directory of the logs.
            steps: number of steps after which `done` is True; 0: no limit.
            gate: socket of the harness; None: the worker runs without pauses.
            settle: function that blocks until the device has completed its work. Without a gate, it
                is called before each commit is recorded. With a gate, it is called only where the
                measured time of a block begins and ends. The time then includes the work of the
                device, but the device does not idle within a block.

        Raises:
            OSError: the directory does not exist.
        """
        self._file = os.open(
            directory / f"{os.getpid()}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        self._limit = steps
        self._committed = 0
        self._settle = settle if gate is None else None
        self._gate = Gate(gate, settle) if gate is not None else None

    def committed(self, *, group: int, world_size: int, rank: int, step: int) -> None:
        """Records a committed step. With a gate, blocks at the end of a block of steps until the
        harness starts the next block."""
        if self._settle is not None:
            self._settle()
        os.write(
            self._file, b"%d %d %d %d %d\n" % (time.monotonic_ns(), group, world_size, rank, step)
        )
        self._committed += 1
        if self._gate is not None:
            self._gate.step_done(rank)

    @property
    def done(self) -> bool:
        """True if the worker should exit: its steps are done, or the harness has dismissed it."""
        return (self._gate is not None and self._gate.closed) or (
            0 < self._limit <= self._committed
        )


class Gate:
    """The worker's end of a gate, a socket on which the harness decides when this worker runs.

    The protocol consists of lines of text. After its first step, the worker sends its rank. The
    harness sends the number of steps in the next block; 0 tells the worker to exit. At the end of a
    block, the worker sends the duration of each step in nanoseconds.
    """

    def __init__(self, path: Path, settle: Callable[[], None] | None = None) -> None:
        self._path = path
        self._settle = settle
        self._socket = socket.socket(socket.AF_UNIX)
        self._lines = self._socket.makefile("r")
        self._left = 0
        self._skip = 0
        self._times: list[int] = []
        self._last = 0
        self._open = False
        self.closed = False

    def step_done(self, rank: int) -> None:
        """Records the duration of a step. At the end of a block, sends the durations to the harness
        and waits for the next block."""
        if self._settle is not None and (not self._open or self._skip == 1 or self._left == 1):
            self._settle()
        now = time.perf_counter_ns()
        if not self._open:
            self._open = True
            self._socket.connect(str(self._path))
            self._send(f"rank {rank}")
            self._await_block()
            return
        if self._skip:
            self._skip -= 1
        else:
            self._times.append(now - self._last)
        self._last = now
        self._left -= 1
        if self._left == 0:
            self._send(" ".join(map(str, self._times)))
            self._await_block()

    def _await_block(self) -> None:
        steps = int(self._lines.readline() or 0)
        self.closed = steps == 0
        self._times, self._skip, self._left = [], WARM_UP_STEPS, steps + WARM_UP_STEPS
        self._last = time.perf_counter_ns()

    def _send(self, line: str) -> None:
        self._socket.sendall(line.encode() + b"\n")


@dataclass
class _Tail:
    offset: int = 0
    rest: bytes = b""


class Tails:
    """Reads the files `<pid><suffix>` in a directory, one for each process, while they grow."""

    def __init__(self, directory: Path, *, suffix: str) -> None:
        self._directory = directory
        self._suffix = suffix
        self._tails: dict[int, _Tail] = {}

    def read(self) -> Iterator[tuple[int, list[bytes]]]:
        """Yields each pid with the lines that were added to its file since the last call. Omits
        incomplete lines, such as a last line that a SIGKILL has truncated."""
        for file in self._directory.glob(f"*{self._suffix}"):
            pid = int(file.stem)
            tail = self._tails.setdefault(pid, _Tail())
            with file.open("rb") as stream:
                stream.seek(tail.offset)
                data = stream.read()
            tail.offset += len(data)
            *lines, tail.rest = (tail.rest + data).split(b"\n")
            yield pid, lines


class StepLogs:
    """Reads the step logs of all processes of a run while they grow."""

    def __init__(self, directory: Path) -> None:
        self._tails = Tails(directory, suffix=".steps")
        self.commits: dict[int, list[Commit]] = {}
        """Commits by the pid of their process, oldest first."""

    def read(self) -> None:
        """Reads the steps that were recorded since the last call."""
        for pid, lines in self._tails.read():
            self.commits.setdefault(pid, []).extend(
                Commit(*map(int, line.split())) for line in lines
            )
