"""The shard map as this server knows it, fetched from the coordinator when a request speaks of one that it does not know.

Belongs to the event loop. The map is fixed once tensors are declared; moving partitions between running servers is not built yet, so a map
that gives this server other partitions than it holds is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from shoal_common.errors import PreconditionError

from shoal_ps_server.shard.layout import Layout

FetchLayout = Callable[[], Awaitable[Layout]]
"""Asks the coordinator. Raises PreconditionError / TENSORS_UNDECLARED, and UnavailableError when it cannot be asked."""


class Layouts:
    """The newest layout, and what is done when a newer one comes."""

    def __init__(self, *, current: Layout | None, fetch: FetchLayout, adopt: Callable[[Layout], None]) -> None:
        self._current = current
        self._fetch = fetch
        self._adopt = adopt
        self._fetching = asyncio.Lock()

    @property
    def current(self) -> Layout | None:
        """The newest known here; None: none yet."""
        return self._current

    async def any(self) -> Layout:
        """The one known here, or the coordinator's if there is none. Raises as FetchLayout."""
        return self._current if self._current is not None else await self._newer_than(0)

    async def of_epoch(self, epoch: int) -> Layout:
        """The layout that a request was made for. Raises PreconditionError / STALE_SHARD_MAP, and as FetchLayout."""
        layout = self._current
        if layout is None or epoch > layout.epoch:
            layout = await self._newer_than(0 if layout is None else layout.epoch)
        if epoch != layout.epoch:
            raise PreconditionError(
                f"shard_map_epoch={epoch}, the map is at epoch {layout.epoch}: get it anew from the coordinator", reason="STALE_SHARD_MAP"
            )
        return layout

    async def _newer_than(self, epoch: int) -> Layout:
        """Asks the coordinator once, however many requests want to know."""
        async with self._fetching:
            if self._current is None or self._current.epoch <= epoch:
                layout = await self._fetch()
                self._check_same(layout)
                self._adopt(layout)
                self._current = layout
            return self._current

    def _check_same(self, layout: Layout) -> None:
        if self._current is not None and not self._current.same_partitions(layout):
            raise PreconditionError(
                f"the shard map at epoch {layout.epoch} gives this server other partitions than the {len(self._current.partitions)} it "
                f"holds since epoch {self._current.epoch}; start it with an empty data directory, or use another job",
                reason="LAYOUT_CONFLICT",
            )
