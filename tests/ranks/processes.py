"""Ranks as real processes for tests. They are forked from a nursery (nursery.py), and some have a
place in MPI's world."""

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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from shoal_common.system.processes import tied_to_parent

from tests.zygote.children import Zygote, eventually

_STUB = Path(__file__).with_name("mpi_stub.py")
_PATIENCE_S = 100.0


class Rank:
    """One process that runs tasks. It sends messages: events, and at the end a result or an
    error."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.pid: int = self.event("born")["pid"]
        self.busy = False
        self.alive = True

    def start(self, task: str, **arguments: Any) -> None:
        """Starts the task "module:function". Its result must be received before the next task."""
        self.busy = True
        self._connection.sendall(
            (json.dumps({"task": task, "arguments": arguments}) + "\n").encode()
        )

    def event(self, name: str) -> dict[str, Any]:
        """Waits for the task's event `name` and returns its message."""
        message = self._next()
        assert message.get("event") == name, f"expected event {name!r}, got {message}"
        return message

    def result(self) -> Any:
        """Waits for the end of the task and returns its result. Fails if the task failed."""
        message = self._next()
        self.busy = False
        assert "result" in message, message.get("error", message)
        return message["result"]

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kills the process, no matter what it is doing."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._reader.join()
        self._connection.close()

    def release(self) -> None:
        """Closes the connection for new tasks, so that the process ends by itself."""
        self._connection.shutdown(socket.SHUT_WR)
        self._reader.join()
        self._connection.close()

    def _next(self) -> dict[str, Any]:
        try:
            return self._said.get(timeout=_PATIENCE_S)
        except queue.Empty:
            raise AssertionError(f"a rank said nothing for {_PATIENCE_S:g} s") from None

    def _read(self) -> None:
        with contextlib.suppress(ConnectionResetError), self._connection.makefile() as lines:
            for line in lines:
                self._said.put(json.loads(line))
        self.alive = False
        self._said.put({"error": "the process ended"})


def run_task(
    ranks: Sequence[Rank], task: str, *, dying: Collection[int] = (), **arguments: Any
) -> dict[int, Any]:
    """Runs a task on all ranks, with its `rank` in addition to `arguments`. Returns the results by
    rank, except those of ranks that are expected to die in it."""
    for number, rank in enumerate(ranks):
        rank.start(task, rank=number, **arguments)
    return {number: rank.result() for number, rank in enumerate(ranks) if number not in dying}


class RankPool:
    """Processes that are not in an MPI world. Those that are alive and idle are reused."""

    def __init__(self, nursery: str) -> None:
        self._nursery = nursery
        self._idle: list[Rank] = []

    @contextmanager
    def taking(self) -> Iterator[Callable[[int], list[Rank]]]:
        """Yields a function that returns this many processes. They are taken back at the end."""
        given: list[Rank] = []

        def take(count: int) -> list[Rank]:
            taken = [self._idle.pop() if self._idle else self._born() for _ in range(count)]
            given.extend(taken)
            return taken

        yield take
        for rank in given:
            if rank.alive and not rank.busy:
                self._idle.append(rank)
            else:
                rank.end()

    def close(self) -> None:
        for rank in self._idle:
            rank.end()

    def _born(self) -> Rank:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._nursery)
        return Rank(connection)


@contextmanager
def mpi_world(nursery: str, size: int, directory: Path) -> Iterator[list[Rank]]:
    """Starts an MPI world of `size` with one mpiexec and yields its processes in rank order."""
    path = str(directory / "mpi.socket")
    with socket.socket(socket.AF_UNIX) as door, (directory / "mpiexec.log").open("wb") as log:
        door.bind(path)
        door.listen()
        door.settimeout(_PATIENCE_S)
        mpiexec = Path(sys.executable).with_name("mpiexec")
        command = [str(mpiexec), "-n", str(size), sys.executable, "-S", str(_STUB), nursery, path]
        process = subprocess.Popen(
            tied_to_parent(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        ranks: list[Rank] = []
        try:
            ranks.extend(Rank(door.accept()[0]) for _ in range(size))
            for rank in ranks:
                rank.start("tests.ranks.mpi:own_rank")
            placed = sorted((rank.result(), index) for index, rank in enumerate(ranks))
            yield [ranks[index] for _, index in placed]
        finally:
            well = [rank for rank in ranks if rank.alive and not rank.busy]
            for rank in well:
                rank.release()
            for rank in ranks:
                if rank not in well:
                    rank.end()
            if len(well) < size:
                process.kill()
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


@pytest.fixture(scope="session")
def nursery(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Path of the socket of a nursery, which forks processes that have imported torch."""
    directory = tmp_path_factory.mktemp("ranks")
    path = str(directory / "socket")
    process = zygote.start("nursery", [path], output=directory / "log")
    eventually(lambda: "ready" in process.said() or process.ended.is_set(), "the nursery")
    assert not process.ended.is_set(), process.said()
    yield path
    process.kill()
    process.wait()


@pytest.fixture(scope="session")
def rank_pool(nursery: str) -> Iterator[RankPool]:
    pool = RankPool(nursery)
    yield pool
    pool.close()


@pytest.fixture
def take_ranks(rank_pool: RankPool) -> Iterator[Callable[[int], list[Rank]]]:
    """Yields a function that returns this many processes that are not in an MPI world."""
    with rank_pool.taking() as take:
        yield take


@pytest.fixture(scope="session")
def mpi_ranks(
    nursery: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[int], list[Rank]]]:
    """Yields a function that returns the ranks of an MPI world of a given size. All tests share one
    world per size, which is replaced when one of its ranks fails."""
    open_worlds: dict[int, tuple[AbstractContextManager[list[Rank]], list[Rank]]] = {}

    def take(size: int) -> list[Rank]:
        world, ranks = open_worlds.pop(size, (None, []))
        if world is None or any(rank.busy or not rank.alive for rank in ranks):
            if world is not None:
                world.__exit__(None, None, None)
            world = mpi_world(nursery, size, tmp_path_factory.mktemp(f"mpi{size}"))
            ranks = world.__enter__()
        open_worlds[size] = (world, ranks)
        return ranks

    yield take
    for world, _ in open_worlds.values():
        world.__exit__(None, None, None)
