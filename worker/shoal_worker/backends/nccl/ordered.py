"""Works that a device's streams wait for and the host does not: those that the host has yet to ask
about, and how long they take.

The host may come late to ask, or be held up: whoever reads a loss waits in CUDA for all that is
queued before it, a collective of a rank that stands still among it. So a thread looks at the oldest
work that has not ended, and says when that takes longer than it may. It begins with the first work,
and ends with the group.

Threads: the one that issues collectives adds and takes; the looking thread reads; `close` is for
any. The lock guards the works.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Final, Protocol

_LOOKS: Final = 4
"""In the time that a collective may take."""
_LONGEST_LOOK_S: Final = 1.0


class OrderedWork(Protocol):
    """A collective on a device."""

    @property
    def name(self) -> str:
        """For errors."""
        ...

    @property
    def ended(self) -> bool:
        """It has run, or failed; does not block."""
        ...

    def wait(self) -> bool:
        """Returns when its result is in place; raises where it has none."""
        ...


class OrderedWorks:
    """The works of one group, in the order in which its device runs them."""

    def __init__(self, allowed: timedelta, overdue: Callable[[str, timedelta], None]) -> None:
        """`overdue(name, allowed)` is called, on a thread of its own, when a work has not ended for
        so long after those before it."""
        self._allowed = allowed
        self._overdue = overdue
        self._lock = threading.Lock()
        self._works: deque[OrderedWork] = deque()
        self._looks = False
        self._closed = threading.Event()

    @property
    def any_left(self) -> bool:
        """The host has yet to ask about some."""
        return bool(self._works)

    def add(self, work: OrderedWork) -> None:
        """A stream waits for `work`. Those before it that have run are asked about now, and let go
        of; raises what they raise."""
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
        """All of them, which are the caller's from here on."""
        with self._lock:
            works = list(self._works)
            self._works.clear()
        return works

    def close(self) -> None:
        """The group is over: nobody looks any more."""
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
