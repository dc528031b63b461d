"""Memory for partitions that are on their way: a bound for all together, and one for each member,
so that none takes the others' share.

Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

DEFAULT_BYTES: Final = 1 << 30
SHARE: Final = 4
"""A member may have one part in so many of it."""


class Staging:
    """The memory of one server's upload streams."""

    def __init__(self, *, nbytes: int = DEFAULT_BYTES) -> None:
        self._most = nbytes
        self._held: Counter[str] = Counter()
        """Member -> bytes."""
        self._freed = asyncio.Event()
        """Set, and replaced, when memory is given back."""

    async def take(self, member: str, nbytes: int) -> Callable[[], None]:
        """Waits for room; returns what gives it back, which may be called more than once. A
        partition alone always finds room."""
        while not self._fits(member, nbytes):
            await self._freed.wait()
        self._held[member] += nbytes
        left = [nbytes]

        def give_back() -> None:
            if left:
                self._held[member] -= left.pop()
                if not self._held[member]:
                    del self._held[member]
                self._freed.set()
                self._freed = asyncio.Event()

        return give_back

    def _fits(self, member: str, nbytes: int) -> bool:
        mine, together = self._held[member], self._held.total()
        return (not mine or mine + nbytes <= self._most // SHARE) and (
            not together or together + nbytes <= self._most
        )
