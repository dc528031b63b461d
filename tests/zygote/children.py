"""Processes for tests, forked from a zygote (__main__.py). They are real processes with their own
pid, environment, signals and exit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from shoal_common.system.processes import tied_to_parent

PATIENCE_S = 200.0


def eventually(
    condition: Callable[[], Any], what: str | Callable[[], str], *, within_s: float = PATIENCE_S
) -> Any:
    """Returns the condition's first true value, or fails after `within_s`.

    what: the awaited event, for the failure's message. A function can describe the current state.
    """
    deadline = time.monotonic() + within_s
    pause_s = 0.01
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {within_s:g} s for {what if isinstance(what, str) else what()}")
        time.sleep(pause_s)
        # the queried process, usually a coordinator, needs time for each answer
        pause_s = min(pause_s * 1.05, 0.04)
    return value


HELPER = "helper-of-shoal"
"""Command line of a process that waits to become a child of a command."""


class Child:
    """One process that the zygote has forked."""

    def __init__(self, output: Path) -> None:
        self.pid = 0
        self.output = output
        self.started = threading.Event()
        self.ended = threading.Event()
        self.status: int | None = None

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                # it has ended, but the zygote has not reported it yet
                os.kill(self.pid, number)

    def kill_beside(self, number: signal.Signals) -> None:
        """Sends the signal to another thread, so that it does not wake the main thread. It is like
        a signal that arrives just before the main thread begins to wait."""
        threads = sorted(int(task.name) for task in Path(f"/proc/{self.pid}/task").iterdir())
        open_to_it = [
            thread
            for thread in threads
            if thread != self.pid and not _blocks(self.pid, thread, number)
        ]
        assert open_to_it, (
            f"process {self.pid} has no thread but the main one that receives {number.name}"
        )
        # Linux delivers it to the process, and tries this thread first
        os.kill(open_to_it[0], number)

    def wait(self) -> int:
        """Returns the exit status. It is negative for a signal, as in Popen."""
        if not self.ended.wait(PATIENCE_S):
            threads = _threads_of(self.pid)
            self.kill(signal.SIGABRT)  # makes it print the Python stacks of all threads
            self.ended.wait(PATIENCE_S)
            pytest.fail(
                f"process {self.pid} did not end; its threads:\n{threads}\n"
                f"its output: {self.said()}"
            )
        assert self.status is not None
        return self.status

    def said(self) -> str:
        """Returns all its output."""
        return self.output.read_text() if self.output.exists() else "nothing"


class ForkedProcess:
    """A command that the zygote has forked, with the methods of `subprocess.Popen` that tests
    use."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.pid = child.pid

    def poll(self) -> int | None:
        """Returns the exit status, or None while the process runs."""
        return self._child.status if self._child.ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status. Raises TimeoutExpired."""
        if not self._child.ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        assert self._child.status is not None
        return self._child.status

    def send_signal(self, number: signal.Signals) -> None:
        self._child.kill(number)

    def kill(self) -> None:
        self._child.kill()


def _threads_of(pid: int) -> str:
    """Describes what the threads of a process are doing in the kernel: state, the CPU time used
    within a second, system call and wait channel. Python's stacks do not show why a thread waits in
    native code, or whether it waits at all."""
    before = _ticks(pid)
    time.sleep(1)
    lines = []
    for thread, ticks in sorted(_ticks(pid).items()):
        task = Path(f"/proc/{pid}/task/{thread}")
        with contextlib.suppress(OSError):  # it has ended
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            name, call, channel = (
                (task / part).read_text().strip() for part in ("comm", "syscall", "wchan")
            )
            used = ticks - before.get(thread, 0)
            lines.append(f"{thread} {name}: {state}, {used} ticks, in {call}, {channel}")
    return "\n".join(lines)


def _ticks(pid: int) -> dict[int, int]:
    """Returns the CPU time of each thread so far, in clock ticks."""
    found = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            found[int(task.name)] = int(fields[11]) + int(fields[12])
    return found


def _blocks(pid: int, thread: int, number: signal.Signals) -> bool:
    """Returns whether a thread blocks the signal."""
    status = Path(f"/proc/{pid}/task/{thread}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


class Zygote:
    """Starts processes quickly; see __main__.py. One thread reads its replies and updates the
    `Child` objects."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.zygote"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            tied_to_parent(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            cwd=root,
        )
        self._children: dict[int, Child] = {}
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def start(
        self, program: str, arguments: Sequence[str], *, output: Path, **environment: str
    ) -> Child:
        """Starts a process of `program` (__main__.PROGRAMS) in this process's environment plus
        `environment`."""
        how = {"arguments": list(arguments), "environment": environment, "output": str(output)}
        return self._start({"program": program, **how}, Child(output))

    def start_command(
        self,
        program: str,
        command: Sequence[str],
        *,
        environment: dict[str, str],
        directory: Path,
        output: Path,
        error: Path,
    ) -> ForkedProcess:
        """Forks a process of `python -m PROGRAM ARGUMENTS`. `environment` is its complete
        environment."""
        how = {
            "command": list(command),
            "arguments": list(command[3:]),
            "environment": environment,
            "directory": str(directory),
            "output": str(output),
            "error": str(error),
        }
        return ForkedProcess(self._start({"program": program, **how}, Child(output)))

    def _start(self, command: dict[str, Any], child: Child) -> Child:
        number = len(self._children)
        self._children[number] = child
        command["start"] = number
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        if not child.started.wait(PATIENCE_S):
            pytest.fail("the zygote does not answer")
        return child

    def close(self) -> None:
        self._process.kill()  # the kernel kills its children
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            # there is no reader for unsent commands any more
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "started" in message:
                child = self._children[message["started"]]
                child.pid = message["pid"]
                child.started.set()
            elif "ended" in message:
                child = self._children[message["ended"]]
                child.status = message["status"]
                child.ended.set()


@pytest.fixture(scope="session")
def zygote(leftover_processes: None) -> Iterator[Zygote]:
    """The zygote, shared by all tests."""
    zygote = Zygote()
    yield zygote
    zygote.close()
