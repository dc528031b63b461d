"""How long to wait before something that failed is tried again."""

from __future__ import annotations

import random
from typing import Final

from shoal_common.errors import ShoalError

_FIRST_S: Final = 0.05
_CHANCE: Final = random.SystemRandom()
"""Spreads the waits. Python's global generator is the script's, which may have seeded it: a fault
must not change what that draws."""


class Backoff:
    """Waits that double from attempt to attempt, up to a longest, and are spread at random over
    their upper half, so that many processes do not come back all at once. Belongs to whoever
    waits."""

    def __init__(self, *, longest_s: float, first_s: float = _FIRST_S) -> None:
        """`first_s`, `longest_s`: seconds, before they are spread."""
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def next_s(self, failure: ShoalError | None = None) -> float:
        """Returns the seconds to wait now, and doubles the next wait. `failure`: what was tried
        failed with; if it says when to try again, the wait is that at least, and up to a quarter
        more."""
        now_s = self._next_s
        self._next_s = min(2 * now_s, self._longest_s)
        own_s = now_s * _CHANCE.uniform(0.5, 1.0)
        if failure is None or failure.retry_after is None:
            return own_s
        return max(own_s, failure.retry_after.total_seconds() * _CHANCE.uniform(1.0, 1.25))

    def reset(self) -> None:
        """Makes the next wait the first one again: what was tried has succeeded."""
        self._next_s = self._first_s
