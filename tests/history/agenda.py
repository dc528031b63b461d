"""Postponed actions of a campaign, each with the time when it is due. It starts no thread: the
caller polls it."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable


class Agenda:
    """Actions in the order in which they are due."""

    def __init__(self) -> None:
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._actions)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Puts it off."""
        heapq.heappush(self._actions, (time.monotonic() + delay_s, next(self._numbers), action))

    def do_what_is_due(self) -> None:
        """Does what is due, and what that makes due."""
        while self._actions and self._actions[0][0] <= time.monotonic():
            heapq.heappop(self._actions)[2]()
