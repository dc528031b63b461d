"""Memory for partitions while they are received. It is limited in total and per member, so that no
member can use up the other members' memory.

Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

DEFAULT_BYTES: Final = 1 << 30
SHARE: Final = 4
"""Inverse of the fraction of the memory that a single member may use."""


class Staging:
    """Memory for all upload streams of one server."""

    def __init__(self, *, nbytes: int = DEFAULT_BYTES) -> None:
        self._most = nbytes
        self._held: Counter[str] = Counter()
        """Member -> number of bytes in use."""
        self._freed = asyncio.Event()
        """Event that is set, and replaced by a new one, when memory is released."""

    async def take(self, member: str, nbytes: int) -> Callable[[], None]:
        """Waits until a member may use `nbytes` more memory. Returns a function that releases the
        memory; it may be called several times.

        The limits never exclude a partition: the per-member limit does not apply while the member
        uses no memory, and the total limit does not apply while no member does."""
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
