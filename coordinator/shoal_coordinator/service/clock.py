"""The two clocks that decisions use: this process's uptime, and Redis's time, synchronized at each
commit.

While a coordinator is suspended (SIGSTOP, a suspended machine), it reads no heartbeats. If this
time counted, all leases would have expired by the time it resumes, even if all members are healthy.
The clock is therefore read continuously, by the loops and by `tick`, and advances by at most a
short interval between two readings.

The clock belongs to the event loop; other threads may read `last_read`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, NoReturn

from shoal_coordinator.membership.model.state import Now

logger = logging.getLogger(__name__)

_TICK_MS: Final = 100
_LONGEST_STEP_MS: Final = 2 * _TICK_MS
"""Maximum advance between two readings. It is less than half of the shortest lease, so that a
member whose heartbeat arrived just before a suspension is not evicted right after it."""
_LOGGED_FROM_MS: Final = 1_000


class Clock:
    """Monotonic milliseconds that exclude suspensions of this process, and Redis's Unix time,
    extrapolated from its last response."""

    def __init__(
        self,
        unix_ms: int,
        *,
        monotonic_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
    ) -> None:
        self._monotonic_ms = monotonic_ms
        self._read_ms = monotonic_ms()
        self._paused_ms = 0
        self._offset_ms = unix_ms - self._read_ms
        self.last_read = Now(ms=self._read_ms, unix_ms=unix_ms)
        """Last reading of both clocks, usually at most a tenth of a second old."""

    def now(self) -> Now:
        """Reads and returns both clocks."""
        read_ms = self._monotonic_ms()
        pause_ms = read_ms - self._read_ms - _LONGEST_STEP_MS
        if pause_ms > 0:
            self._paused_ms += pause_ms
            if pause_ms >= _LOGGED_FROM_MS:
                logger.warning(
                    "this process was suspended for %.1f s; no lease or deadline ran during that "
                    "time",
                    pause_ms / 1000,
                )
        self._read_ms = read_ms
        self.last_read = Now(ms=read_ms - self._paused_ms, unix_ms=read_ms + self._offset_ms)
        return self.last_read

    def adjust(self, unix_ms: int) -> None:
        """Synchronizes the Unix clock with the time that Redis has just returned."""
        self._offset_ms = unix_ms - self._monotonic_ms()

    async def tick(self) -> NoReturn:
        """Reads the clock regularly until cancelled, so that an interval without readings indicates
        a paused process rather than an idle one."""
        while True:
            await asyncio.sleep(_TICK_MS / 1000)
            self.now()
