"""This server's view of the shard map, fetched from the coordinator when a request names a newer
one. Belongs to the event loop.

A newer map may change this server's partitions: those handed over to it are served from then on,
and those it gave away are dropped (storage/moves.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from shoal_common.errors import PreconditionError, UnavailableError

from shoal_ps_server.shard.layout import Layout

FetchLayout = Callable[[], Awaitable[Layout]]
"""Fetches the shard map from the coordinator. Raises PreconditionError / TENSORS_UNDECLARED, and
UnavailableError if the coordinator cannot be reached."""


class Layouts:
    """The newest layout, with the adoption of newer ones."""

    def __init__(
        self,
        *,
        current: Layout | None,
        fetch: FetchLayout,
        adopt: Callable[[Layout], Awaitable[None]],
    ) -> None:
        """`adopt`: makes sure that the server holds the partitions of a layout, then makes it
        current through `becomes`; waiters may disappear meanwhile. Raises PreconditionError /
        LAYOUT_CONFLICT, and UnavailableError."""
        self._current = current
        self._fetch = fetch
        self._adopt = adopt
        self._fetching = asyncio.Lock()

    @property
    def current(self) -> Layout | None:
        """Newest layout known here; None if there is none yet."""
        return self._current

    def becomes(self, layout: Layout | None) -> None:
        """Makes this layout current; None: it must be fetched again."""
        self._current = layout

    async def any(self) -> Layout:
        """Returns the layout known here, or the coordinator's if there is none. Raises like
        FetchLayout and `adopt`."""
        return self._current if self._current is not None else await self._newer_than(0)

    async def of_epoch(self, epoch: int) -> Layout:
        """Returns the layout for which a request was made. Raises PreconditionError /
        STALE_SHARD_MAP, and like `any`."""
        layout = self._current
        if layout is None or epoch > layout.epoch:
            layout = await self._newer_than(0 if layout is None else layout.epoch)
        if epoch != layout.epoch:
            raise PreconditionError(
                f"shard_map_epoch={epoch}, but the shard map is at epoch {layout.epoch}; fetch it "
                "again from the coordinator",
                reason="STALE_SHARD_MAP",
            )
        return layout

    async def at_least(self, epoch: int, afresh: bool = False) -> Layout:
        """Returns the layout of an epoch or a newer one; `afresh`: the coordinator's current one.
        Raises UnavailableError / PLACE_UNKNOWN if the coordinator has none that new, and like
        `any`."""
        layout = self._current
        if layout is None or layout.epoch < epoch or afresh:
            layout = await self._newer_than(0 if layout is None else layout.epoch)
        if layout.epoch < epoch:
            raise UnavailableError(
                f"the shard map is at epoch {layout.epoch}, but the coordinator announced epoch "
                f"{epoch}; try again",
                reason="PLACE_UNKNOWN",
            )
        return layout

    async def _newer_than(self, epoch: int) -> Layout:
        """Fetches a newer layout from the coordinator, once for all concurrent requests."""
        async with self._fetching:
            if self._current is None or self._current.epoch <= epoch:
                layout = await self._fetch()
                if self._current is None or layout.epoch > self._current.epoch:
                    await self._adopt(layout)
            assert self._current is not None, "it was adopted"
            return self._current
