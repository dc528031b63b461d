"""Ranks as real processes. Importing torch takes seconds, so one process imports it, and ranks are its forks (rank_tasks.py)."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shoal_common.processes import tied_to_parent

_ROOT = Path(__file__).parents[3]
_MAIN = "tests.integration.worker_backends.rank_tasks"
_PATIENCE_S = 60.0


class Rank:
    """One process that runs tasks. It says things: events, and in the end a result or an error."""

    def __init__(self, nursery: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(nursery)
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.pid: int = self.event("born")["pid"]
        self.busy = False
        self.alive = True

    def start(self, task: str, **arguments: Any) -> None:
        """Begins a task; its result is to be asked for before the next."""
        self.busy = True
        self._connection.sendall((json.dumps({"task": task, "arguments": arguments}) + "\n").encode())

    def event(self, name: str) -> dict[str, Any]:
        """Waits for the task to say `name`; what it said with it."""
        said = self._next()
        assert said.get("event") == name, f"expected event {name!r}, got {said}"
        return said

    def result(self) -> Any:
        """Waits for the task's end; fails if it failed."""
        said = self._next()
        self.busy = False
        assert "result" in said, said.get("error", said)
        return said["result"]

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """Ends the process, whatever it is at."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._reader.join()
        self._connection.close()

    def _next(self) -> dict[str, Any]:
        try:
            return self._said.get(timeout=_PATIENCE_S)
        except queue.Empty:
            raise AssertionError(f"a rank said nothing for {_PATIENCE_S:g} s") from None

    def _read(self) -> None:
        with self._connection.makefile() as lines:
            for line in lines:
                self._said.put(json.loads(line))
        self.alive = False
        self._said.put({"error": "the process ended"})


@pytest.fixture(scope="session")
def _nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where processes that have imported torch can be had."""
    path = str(tmp_path_factory.mktemp("ranks") / "socket")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = tied_to_parent([sys.executable, "-m", _MAIN, path])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=_ROOT)
    assert process.stdout is not None
    with process.stdout as ready:
        assert ready.readline() == b"ready\n"
    yield path
    process.kill()
    process.wait()


@pytest.fixture(scope="session")
def _idle_ranks() -> Iterator[list[Rank]]:
    idle: list[Rank] = []
    yield idle
    for rank in idle:
        rank.end()


@pytest.fixture
def ranks(_nursery: str, _idle_ranks: list[Rank]) -> Iterator[Callable[[int], list[Rank]]]:
    """Gives so many processes. Those that are well and idle at the test's end serve the next one."""
    given: list[Rank] = []

    def take(count: int) -> list[Rank]:
        taken = [_idle_ranks.pop() if _idle_ranks else Rank(_nursery) for _ in range(count)]
        given.extend(taken)
        return taken

    yield take
    for rank in given:
        if rank.alive and not rank.busy:
            _idle_ranks.append(rank)
        else:
            rank.end()


@pytest.fixture
def prefix() -> str:
    return f"shoal:{{test}}:{uuid.uuid4().hex}"
