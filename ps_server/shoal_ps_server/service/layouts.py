"""This server's copy of the shard map. If a request refers to a newer shard map, it is fetched from
the coordinator. Belongs to the event loop.

A newer map may assign different partitions to this server. Partitions received from another server
are then served, and partitions that this server has given away are dropped (storage/moves.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from shoal_common.errors import PreconditionError, UnavailableError

from shoal_ps_server.shard.layout import Layout

FetchLayout = Callable[[], Awaitable[Layout]]
"""Function that fetches the shard map from the coordinator. Raises PreconditionError /
TENSORS_UNDECLARED, and UnavailableError if the coordinator cannot be reached."""


class Layouts:
    """Newest layout known to this server. A newer layout is adopted when a request refers to it."""

    def __init__(
        self,
        *,
        current: Layout | None,
        fetch: FetchLayout,
        adopt: Callable[[Layout], Awaitable[None]],
    ) -> None:
        """`fetch`: fetches the current layout from the coordinator. `adopt`: checks that the server
        has the partitions of a fetched layout, and then makes the layout current by calling
        `becomes`. It must complete even if the request that caused it is cancelled. It raises
        PreconditionError / LAYOUT_CONFLICT, and UnavailableError."""
        self._current = current
        self._fetch = fetch
        self._adopt = adopt
        self._fetching = asyncio.Lock()

    @property
    def current(self) -> Layout | None:
        """Newest layout known to this server; None if there is none yet."""
        return self._current

    def becomes(self, layout: Layout | None) -> None:
        """Makes `layout` current. None means that the layout must be fetched again."""
        self._current = layout

    async def any(self) -> Layout:
        """Returns the newest layout known to this server. If there is none, fetches the layout from
        the coordinator. Raises the errors of FetchLayout and `adopt`."""
        return self._current if self._current is not None else await self._newer_than(0)

    async def of_epoch(self, epoch: int) -> Layout:
        """Returns the layout of `epoch`, the epoch named in a request. Raises PreconditionError /
        STALE_SHARD_MAP if the current layout has a different epoch, and the errors of `any`."""
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
        """Returns the layout of `epoch` or of a newer epoch. `afresh`: True to fetch the
        coordinator's current layout in any case. Raises UnavailableError / PLACE_UNKNOWN if the
        coordinator's layout is older than `epoch`, and the errors of `any`."""
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
        """Returns the current layout. Unless it is newer than `epoch`, first fetches the layout
        from the coordinator. Concurrent requests share one fetch."""
        async with self._fetching:
            if self._current is None or self._current.epoch <= epoch:
                layout = await self._fetch()
                if self._current is None or layout.epoch > self._current.epoch:
                    await self._adopt(layout)
            assert self._current is not None, "it was adopted"
            return self._current
