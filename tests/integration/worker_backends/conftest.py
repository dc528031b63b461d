"""Ranks as real processes. Importing torch takes seconds, so processes are kept and given one task after the other (rank_tasks.py)."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shoal_common.processes import tied_to_parent

_MAIN = Path(__file__).with_name("rank_tasks.py")
_PATIENCE_S = 30.0


class Rank:
    """One process that runs tasks. It says things: events, and in the end a result or an error."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            tied_to_parent([sys.executable, str(_MAIN)]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        self.busy = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self, task: str, **arguments: Any) -> None:
        """Begins a task; its result is to be asked for before the next."""
        assert self._process.stdin is not None
        self.busy = True
        self._process.stdin.write(json.dumps({"task": task, "arguments": arguments}) + "\n")
        self._process.stdin.flush()

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
        self._process.send_signal(number)

    def end(self) -> None:
        """Ends the process, whatever it is at."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _next(self) -> dict[str, Any]:
        try:
            return self._said.get(timeout=_PATIENCE_S)
        except queue.Empty:
            raise AssertionError(f"rank process {self.pid} said nothing for {_PATIENCE_S:g} s") from None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(json.loads(line))
        self._said.put({"error": f"process {self.pid} ended"})


@pytest.fixture(scope="session")
def _idle_ranks() -> Iterator[list[Rank]]:
    idle: list[Rank] = []
    yield idle
    for rank in idle:
        rank.end()


@pytest.fixture
def ranks(_idle_ranks: list[Rank]) -> Iterator[Callable[[int], list[Rank]]]:
    """Gives so many processes. Those that are well and idle at the test's end serve the next one."""
    given: list[Rank] = []

    def take(count: int) -> list[Rank]:
        taken = [_idle_ranks.pop() if _idle_ranks else Rank() for _ in range(count)]
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
