"""A line in the log every ten seconds while a thread waits: for what, for how long, and why it is not there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

_log = logging.getLogger(__name__)

EVERY_S: Final = 10.0


class WaitingLines:
    """Of one wait; belongs to the thread that waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, said_before_s: float = 0.0) -> None:
        """The wait began `said_before_s` ago, and nothing has been said of it yet."""
        self._clock = clock
        self._started = self._said = clock() - said_before_s

    def say(self, what: str, why: Callable[[], str]) -> None:
        """Called again and again while it waits. `why` is asked only when a line is due."""
        now = self._clock()
        if now >= self._said + EVERY_S:
            self._said = now
            _log.warning("waiting for %s for %.0f s: %s", what, now - self._started, why())
