"""Records how long a rank waits for its peers. Every wait for a collective is recorded, for
heartbeats and for the explanation of a stalled step.

The training thread writes the record, and any thread may read it. There is no lock, because only
single values are read: a reader may see a wait that has just ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

_PART_OF_ANOTHER: Final = nullcontext()


class Waits:
    """Record of the waits of one rank. A nested wait counts as part of the outer wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: function that returns the time in seconds since an arbitrary moment."""
        self._clock = clock
        self._since: tuple[float, str] | None = None
        self._total_s = 0.0
        self._last_s, self._last = 0.0, ""
        self._held = False

    def of(self, what: str) -> AbstractContextManager[object]:
        """Returns a context that records a wait of this rank. `what`: what the rank is waiting
        for."""
        return _Wait(self, what) if self._since is None else _PART_OF_ANOTHER

    def begin(self, what: str) -> None:
        """Records the beginning of a wait. `what`: what the rank is waiting for."""
        self._since = (self._clock(), what)

    def end(self) -> None:
        """Ends the current wait and records its duration."""
        since, self._since = self._since, None
        if since is not None:  # otherwise another thread's wait has ended this one
            self._last_s, self._last = self._clock() - since[0], since[1]
            self._total_s += self._last_s

    def hold(self, what: str | None) -> None:
        """Begins a wait for `what` that lasts until `hold(None)` is called, regardless of other
        waits in between. A call has no effect if such a wait is already in progress, or if there is
        none to end."""
        if (what is not None) == self._held:
            return
        self._held = what is not None
        if what is not None:
            self.begin(what)
        else:
            self.end()

    @property
    def now(self) -> tuple[float, str]:
        """Number of seconds that the training thread has been waiting, and what it is waiting for;
        (0, "") if it is not waiting."""
        since = self._since
        return (self._clock() - since[0], since[1]) if since is not None else (0.0, "")

    @property
    def last_s(self) -> float:
        """Duration of the last finished wait, in seconds."""
        return self._last_s

    @property
    def last(self) -> str:
        """Description of the last finished wait: what the rank was waiting for; empty if there was
        none."""
        return self._last

    @property
    def total_s(self) -> float:
        """Total duration of all finished waits, in seconds."""
        return self._total_s


class _Wait:
    """Context that records a wait that is not nested in another one."""

    __slots__ = ("_waits", "_what")

    def __init__(self, waits: Waits, what: str) -> None:
        self._waits = waits
        self._what = what

    def __enter__(self) -> None:
        self._waits.begin(self._what)

    def __exit__(self, *_: object) -> None:
        self._waits.end()
