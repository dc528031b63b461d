"""Postponed actions of a campaign, each with the time when it is due. No thread is involved: the
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
        """Postpones an action."""
        heapq.heappush(self._actions, (time.monotonic() + delay_s, next(self._numbers), action))

    def do_what_is_due(self) -> None:
        """Runs the actions that are due, including those that become due while it runs."""
        while self._actions and self._actions[0][0] <= time.monotonic():
            heapq.heappop(self._actions)[2]()
