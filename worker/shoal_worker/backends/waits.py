"""How long a rank waits for its peers: noted where works are waited for, read by heartbeats and by whoever explains a step that stands.

The training thread waits; any thread reads. Single values only, so there is no lock: a reader may see a wait that has just ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Waits:
    """The waits of one rank, one at a time: a wait within another is part of it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds since anywhere."""
        self._clock = clock
        self._since: tuple[float, str] | None = None
        self._total_s = 0.0
        self._last_s = 0.0

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """While open, this rank waits in `what`."""
        if self._since is not None:
            yield
            return
        started = self._clock()
        self._since = (started, what)
        try:
            yield
        finally:
            self._since = None
            self._last_s = self._clock() - started
            self._total_s += self._last_s

    @property
    def now(self) -> tuple[float, str]:
        """For how many seconds it has waited, and in what; (0, ""): it does not wait."""
        since = self._since
        return (self._clock() - since[0], since[1]) if since is not None else (0.0, "")

    @property
    def last_s(self) -> float:
        """How long the wait that ended last had taken."""
        return self._last_s

    @property
    def total_s(self) -> float:
        """All waits that have ended."""
        return self._total_s
