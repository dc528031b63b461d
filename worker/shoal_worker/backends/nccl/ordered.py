"""Keeps works that a device's streams wait for but the host has not checked yet, and enforces their
time limit.

The host may check late or be blocked: reading a loss waits in CUDA for all operations queued before
it, including a collective that waits for a stalled rank. A thread therefore watches the oldest
unfinished work and reports when it exceeds its time limit. The thread starts with the first work
and stops with the group.

Threads: the issuing thread adds and takes works, the watching thread reads them, and any thread may
call `close`. The lock guards the works."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Final, Protocol

_LOOKS: Final = 4
"""Number of checks within a collective's time limit."""
_LONGEST_LOOK_S: Final = 1.0


class OrderedWork(Protocol):
    """Interface of a collective on a device, as used by `OrderedWorks`."""

    @property
    def name(self) -> str:
        """Name of the collective, for errors."""
        ...

    @property
    def ended(self) -> bool:
        """True if the work has completed or failed. Does not block."""
        ...

    def wait(self) -> bool:
        """Blocks until the result has arrived. Raises an error if the collective has failed."""
        ...


class OrderedWorks:
    """Works of one group that the host has not checked yet, in the order in which the device
    executes them."""

    def __init__(self, allowed: timedelta, overdue: Callable[[str, timedelta], None]) -> None:
        """`allowed`: time limit of a work, from the end of all earlier works. `overdue`: function
        called on the watching thread, with the work's name and the limit, when a work exceeds its
        limit."""
        self._allowed = allowed
        self._overdue = overdue
        self._lock = threading.Lock()
        self._works: deque[OrderedWork] = deque()
        self._looks = False
        self._closed = threading.Event()

    @property
    def any_left(self) -> bool:
        """True if there are works that the host has not checked yet."""
        return bool(self._works)

    def add(self, work: OrderedWork) -> None:
        """Adds a work that a stream waits for. Also checks and removes earlier works that have
        already run, and raises their errors."""
        while self._works and self._works[0].ended:
            with self._lock:
                first = self._works.popleft()
            first.wait()
        with self._lock:
            self._works.append(work)
            begins, self._looks = not self._looks, True
        if begins:
            threading.Thread(target=self._look, name="shoal-nccl-time", daemon=True).start()

    def take(self) -> list[OrderedWork]:
        """Removes and returns all works."""
        with self._lock:
            works = list(self._works)
            self._works.clear()
        return works

    def close(self) -> None:
        """Stops the watching thread after the group has ended."""
        self._closed.set()

    def _look(self) -> None:
        longest_s = self._allowed.total_seconds()
        oldest, since = None, 0.0
        while not self._closed.wait(min(longest_s / _LOOKS, _LONGEST_LOOK_S)):
            with self._lock:
                works = list(self._works)
            running = next((work for work in works if not work.ended), None)
            if running is None or running is not oldest:
                oldest, since = running, time.monotonic()
            elif time.monotonic() - since > longest_s:
                self._overdue(running.name, self._allowed)
