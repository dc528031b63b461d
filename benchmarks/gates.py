"""Gates, as seen by the benchmark's main process (the harness). A gate lets one system's workers
run a block of steps while the workers of the other systems wait.

With gates, systems that are already running take turns of about half a second. If the machine
becomes slower, all systems are therefore affected alike.
"""

from __future__ import annotations

import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.errors import MeasurementError


class Gate:
    """Gate of one system's workers. `benchmarks.workers.steplog.Gate` documents the protocol."""

    def __init__(self, path: Path, *, ranks: int, timeout_s: float) -> None:
        """Listens on the Unix socket `path` for the connections of `ranks` workers. `timeout_s`:
        limit of each wait for a worker."""
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        self._workers: dict[int, socket.socket] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers.values():
            worker.close()
        self._listener.close()

    def complete(self) -> bool:
        """Accepts pending connections without waiting, and returns whether all workers have
        connected. A worker connects after its first step."""
        while len(self._workers) < self._ranks:
            try:
                worker, _ = self._listener.accept()
            except BlockingIOError:
                return False
            worker.settimeout(self._timeout_s)
            self._workers[int(_line(worker).removeprefix("rank "))] = worker
        return True

    def block(self, steps: int) -> list[list[float]]:
        """Runs this many steps on all workers. Returns each rank's step times in seconds. Raises
        MeasurementError if a worker fails or does not respond."""
        order = sorted(self._workers)
        for rank in order:
            self._workers[rank].sendall(b"%d\n" % steps)
        try:
            return [
                [int(time) / 1e9 for time in _line(self._workers[rank]).split()] for rank in order
            ]
        except (TimeoutError, OSError) as error:
            raise MeasurementError(f"a block of {steps} steps did not end: {error}") from error

    def dismiss(self) -> None:
        """Tells the workers to exit."""
        for worker in self._workers.values():
            worker.sendall(b"0\n")


def _line(connection: socket.socket) -> str:
    parts = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = connection.recv(1 << 16)
        if not part:
            raise MeasurementError("a worker went away")
        parts.append(part)
    return b"".join(parts).decode()
