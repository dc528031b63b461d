"""Exponential backoff between attempts at an operation."""

from __future__ import annotations

import random
from typing import Final

from shoal_common.errors import ShoalError

_FIRST_S: Final = 0.05
_CHANCE: Final = random.SystemRandom()
"""Source of randomness for jitter. Python's global generator is not used, because the script may
have seeded it, and a fault must not change the script's random numbers."""


class Backoff:
    """Computes delays that double with each attempt, up to a maximum. Each delay is reduced by a
    random amount of up to half, so that many processes do not retry at the same time. Not
    thread-safe."""

    def __init__(self, *, longest_s: float, first_s: float = _FIRST_S) -> None:
        """`first_s`, `longest_s`: first and maximum delay in seconds, before jitter."""
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def next_s(self, failure: ShoalError | None = None) -> float:
        """Returns the seconds to wait before the next attempt, and doubles the delay after that.

        `failure`: error of the last attempt. If it has a `retry_after`, the result is at least
        `retry_after`, extended by a random amount of up to 25 %.
        """
        now_s = self._next_s
        self._next_s = min(2 * now_s, self._longest_s)
        own_s = now_s * _CHANCE.uniform(0.5, 1.0)
        if failure is None or failure.retry_after is None:
            return own_s
        return max(own_s, failure.retry_after.total_seconds() * _CHANCE.uniform(1.0, 1.25))

    def reset(self) -> None:
        """Resets the delay to its first value. Must be called after a successful attempt."""
        self._next_s = self._first_s
