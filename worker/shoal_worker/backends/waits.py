"""Durations of a rank's waits for its peers: noted where works are waited for, read by heartbeats
and by whoever explains a stalled step.

The training thread waits; any thread reads. Single values only, so there is no lock: a reader may
see a wait that has just ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

_PART_OF_ANOTHER: Final = nullcontext()


class Waits:
    """The waits of one rank, one at a time: a wait within another is part of it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds since anywhere."""
        self._clock = clock
        self._since: tuple[float, str] | None = None
        self._total_s = 0.0
        self._last_s = 0.0
        self._held = False

    def of(self, what: str) -> AbstractContextManager[object]:
        """Records a wait of this rank in `what` while the context is open."""
        return _Wait(self, what) if self._since is None else _PART_OF_ANOTHER

    def begin(self, what: str) -> None:
        """Begins a wait; see `of`."""
        self._since = (self._clock(), what)

    def end(self) -> None:
        """Ends a wait; see `of`."""
        since, self._since = self._since, None
        if since is not None:  # else another thread's wait has ended this one
            self._last_s = self._clock() - since[0]
            self._total_s += self._last_s

    def hold(self, what: str | None) -> None:
        """Begins a wait that goes on until this is called with None, whatever is waited for in
        between. Said again, it changes nothing."""
        if (what is not None) == self._held:
            return
        self._held = what is not None
        if what is not None:
            self.begin(what)
        else:
            self.end()

    @property
    def now(self) -> tuple[float, str]:
        """Returns for how many seconds the training thread has waited, and in what; (0, "") if it
        does not wait."""
        since = self._since
        return (self._clock() - since[0], since[1]) if since is not None else (0.0, "")

    @property
    def last_s(self) -> float:
        """Seconds that the wait which ended last had taken."""
        return self._last_s

    @property
    def total_s(self) -> float:
        """Seconds of all waits that have ended."""
        return self._total_s


class _Wait:
    """Context of one wait that is no part of another one."""

    __slots__ = ("_waits", "_what")

    def __init__(self, waits: Waits, what: str) -> None:
        self._waits = waits
        self._what = what

    def __enter__(self) -> None:
        self._waits.begin(self._what)

    def __exit__(self, *_: object) -> None:
        self._waits.end()
