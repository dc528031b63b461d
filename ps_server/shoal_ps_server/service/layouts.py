"""The shard map as this server knows it, fetched from the coordinator when a newer one is spoken
of. Belongs to the event loop.

A newer map may give this server other partitions: those that another server handed over to it are
served from then on, and those that it gave away are gone (storage/moves.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from shoal_common.errors import PreconditionError, UnavailableError

from shoal_ps_server.shard.layout import Layout

FetchLayout = Callable[[], Awaitable[Layout]]
"""Asks the coordinator. Raises PreconditionError / TENSORS_UNDECLARED, and UnavailableError when it
cannot be asked."""


class Layouts:
    """The newest layout, and what is done when a newer one comes."""

    def __init__(
        self,
        *,
        current: Layout | None,
        fetch: FetchLayout,
        adopt: Callable[[Layout], Awaitable[None]],
    ) -> None:
        """`adopt`: sees that the server holds what a layout gives it, and that it `becomes` the
        newest; whoever waits for it may go away meanwhile. Raises PreconditionError /
        LAYOUT_CONFLICT, and UnavailableError."""
        self._current = current
        self._fetch = fetch
        self._adopt = adopt
        self._fetching = asyncio.Lock()

    @property
    def current(self) -> Layout | None:
        """The newest known here; None: none yet."""
        return self._current

    def becomes(self, layout: Layout | None) -> None:
        """This one counts from now on; None: it is to be asked for anew."""
        self._current = layout

    async def any(self) -> Layout:
        """The one known here, or the coordinator's if there is none. Raises as FetchLayout and
        `adopt`."""
        return self._current if self._current is not None else await self._newer_than(0)

    async def of_epoch(self, epoch: int) -> Layout:
        """The layout that a request was made for. Raises PreconditionError / STALE_SHARD_MAP, and
        as `any`."""
        layout = self._current
        if layout is None or epoch > layout.epoch:
            layout = await self._newer_than(0 if layout is None else layout.epoch)
        if epoch != layout.epoch:
            raise PreconditionError(
                f"shard_map_epoch={epoch}, the map is at epoch {layout.epoch}: get it anew from "
                "the coordinator",
                reason="STALE_SHARD_MAP",
            )
        return layout

    async def at_least(self, epoch: int, afresh: bool = False) -> Layout:
        """The layout of an epoch, or a newer one; `afresh`: as the coordinator has it now. Raises
        UnavailableError / PLACE_UNKNOWN when the coordinator has none so new, and as `any`."""
        layout = self._current
        if layout is None or layout.epoch < epoch or afresh:
            layout = await self._newer_than(0 if layout is None else layout.epoch)
        if layout.epoch < epoch:
            raise UnavailableError(
                f"the shard map is at epoch {layout.epoch}, epoch {epoch} was spoken of; try again",
                reason="PLACE_UNKNOWN",
            )
        return layout

    async def _newer_than(self, epoch: int) -> Layout:
        """Asks the coordinator once, however many requests want to know."""
        async with self._fetching:
            if self._current is None or self._current.epoch <= epoch:
                layout = await self._fetch()
                if self._current is None or layout.epoch > self._current.epoch:
                    await self._adopt(layout)
            assert self._current is not None, "it was adopted"
            return self._current
