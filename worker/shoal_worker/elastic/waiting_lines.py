"""A line in the log every ten seconds while a thread waits: for what, for how long, and why it is not there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

_log = logging.getLogger(__name__)

EVERY_S: Final = 10.0


class WaitingLines:
    """The lines that one wait writes to the log; belongs to the thread that waits."""

    def __init__(self, *, waited_s: float = 0.0, first_in_s: float | None = None) -> None:
        """The wait began `waited_s` ago; the first line is due in `first_in_s` (None: as the others)."""
        now = time.monotonic()
        self._started = now - waited_s
        self._said = now - EVERY_S + (EVERY_S if first_in_s is None else first_in_s)

    def say(self, what: str, why: Callable[[], str]) -> None:
        """Called again and again while it waits. `why` is asked only when a line is due."""
        now = time.monotonic()
        if now >= self._said + EVERY_S:
            self._said = now
            _log.warning("waiting for %s for %.0f s: %s", what, now - self._started, why())
