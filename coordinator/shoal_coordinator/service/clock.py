"""The two clocks that decisions use: one of the time that this process was awake, and Redis' time,
kept in step by the commits.

A coordinator that was stopped (SIGSTOP, a paused machine, a laptop's lid) has read no heartbeat
meanwhile. If that time counted, every lease would be over when it wakes, although the members were
well. So it does not count: the clock is read all the time, by the loops and by `tick`, and advances
by no more than a moment from one reading to the next.

Belongs to the event loop; other threads may read `last_read`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, NoReturn

from shoal_coordinator.membership.state import Now

logger = logging.getLogger(__name__)

_TICK_MS: Final = 100
_LONGEST_STEP_MS: Final = 2 * _TICK_MS
"""Less than half of the shortest lease: a member that was heard of just before a pause is not given
up just after it."""
_TOLD_FROM_MS: Final = 1_000


class Clock:
    """Monotonic milliseconds without those that this process was stopped for, and Redis' Unix time
    as of its last answer."""

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
        """Both clocks as they were last read: a tenth of a second ago, if nothing was asked
        since."""

    def now(self) -> Now:
        """Both clocks."""
        read_ms = self._monotonic_ms()
        pause_ms = read_ms - self._read_ms - _LONGEST_STEP_MS
        if pause_ms > 0:
            self._paused_ms += pause_ms
            if pause_ms >= _TOLD_FROM_MS:
                logger.warning(
                    "this process stood still for %.1f s; no lease or deadline has run meanwhile",
                    pause_ms / 1000,
                )
        self._read_ms = read_ms
        self.last_read = Now(ms=read_ms - self._paused_ms, unix_ms=read_ms + self._offset_ms)
        return self.last_read

    def adjust(self, unix_ms: int) -> None:
        """Redis has just said what time it is."""
        self._offset_ms = unix_ms - self._monotonic_ms()

    async def tick(self) -> NoReturn:
        """Reads the clock until cancelled, so that a time without readings is a pause and not
        idleness."""
        while True:
            await asyncio.sleep(_TICK_MS / 1000)
            self.now()
