"""Delays between attempts."""

from __future__ import annotations

import random
from typing import Final

from shoal_common.errors import ShoalError

_FIRST_S: Final = 0.05
_CHANCE: Final = random.SystemRandom()
"""Source of jitter. Python's global generator belongs to the script, which may have seeded it: a
fault must not change the script's random numbers."""


class Backoff:
    """Delays that double with each attempt up to a maximum, with jitter over their upper half so
    that many processes do not retry at once. Not thread-safe."""

    def __init__(self, *, longest_s: float, first_s: float = _FIRST_S) -> None:
        """`first_s`, `longest_s`: seconds, before jitter."""
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def next_s(self, failure: ShoalError | None = None) -> float:
        """Returns the seconds to wait now, and doubles the next delay. `failure`: the error of the
        last attempt; if it says when to retry, the delay is at least that, and up to a quarter
        more."""
        now_s = self._next_s
        self._next_s = min(2 * now_s, self._longest_s)
        own_s = now_s * _CHANCE.uniform(0.5, 1.0)
        if failure is None or failure.retry_after is None:
            return own_s
        return max(own_s, failure.retry_after.total_seconds() * _CHANCE.uniform(1.0, 1.25))

    def reset(self) -> None:
        """Resets the next delay to the first one, after a successful attempt."""
        self._next_s = self._first_s
