"""The two clocks that decisions use: this machine's monotonic one, and Redis' time, kept in step by the commits."""

from __future__ import annotations

import time

from shoal_coordinator.membership.state import Now


class Clock:
    """Monotonic milliseconds, and Redis' Unix time as of the last answer plus what has passed since."""

    def __init__(self, unix_ms: int) -> None:
        self._offset_ms = unix_ms - _monotonic_ms()

    def now(self) -> Now:
        """Both clocks."""
        ms = _monotonic_ms()
        return Now(ms=ms, unix_ms=ms + self._offset_ms)

    def adjust(self, unix_ms: int) -> None:
        """Redis has just said what time it is."""
        self._offset_ms = unix_ms - _monotonic_ms()


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000
