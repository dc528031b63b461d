"""The place that the coordinator has assigned to this server: its index in the job, and whether the
server must serve requests.

A server that does not know its place does not serve requests, because a different server may have
the place by now. Other modules act on the place: `ParameterServer` serves, and `Standby` follows a
primary. Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from datetime import timedelta
from typing import Final

from shoal_common.errors import ConfigurationError, UnavailableError

from shoal_ps_server.replication.primary import Backup
from shoal_ps_server.service.layouts import Layouts
from shoal_ps_server.session import Place
from shoal_ps_server.shard.shard import Shard
from shoal_ps_server.storage.moves import Moves
from shoal_ps_server.storage.recovery import Recovered

logger = logging.getLogger(__name__)

_PLACE_WAIT: Final = timedelta(seconds=5)
"""Maximum wait of a request until the coordinator has assigned a place to this server."""


class PrimaryPlace:
    """The place of a server in the role of a primary, from the start of its process until the
    coordinator makes it a backup."""

    def __init__(
        self,
        *,
        job_id: str,
        recovered: Recovered,
        has_journal: bool,
        layouts: Layouts,
        backup: Backup,
    ) -> None:
        """`recovered`: the server's state at its start. `has_journal`: True if the server has a
        journal. `layouts`, `backup`: this object informs them of changes of the place."""
        self._job_id = job_id
        self._held_backup = recovered.backup
        self._has_journal = has_journal
        self._shard: Shard = recovered.shard
        self._moves: Moves = recovered.moves
        self._layouts = layouts
        self._backup = backup
        self.server_index = None if recovered.layout is None else recovered.layout.server_index
        self._is_registered = False
        """True if the coordinator has accepted this process's registration. Its later messages
        about the place then refer to `server_index`."""
        self._epoch = 0
        """Newest known epoch of this server's place."""
        self.with_backups = False
        """True if the job's servers have backups."""
        self._known = asyncio.Event()
        if recovered.layout is not None and not recovered.backup:
            self._known.set()  # without a backup, no other server can have the place
        self.replaced = asyncio.Event()
        """Event that is set when the coordinator makes this server a backup."""

    @property
    def is_known(self) -> bool:
        """True if the coordinator has assigned a place, or if no other server can have this
        server's place."""
        return self._known.is_set()

    @property
    def held_index(self) -> int | None:
        """Place whose partitions this server has; None if it has no partitions."""
        layout = self._layouts.current
        return None if layout is None or self._has_given_all() else layout.server_index

    def welcomed(self, server_index: int, *, with_backups: bool) -> None:
        """Records the place assigned in the coordinator's welcome. Implements
        `Listener.welcomed`."""
        if with_backups and not self._has_journal:
            raise ConfigurationError(
                "this job's parameter servers have backups, which need a journal; start each "
                "server with --data-dir"
            )
        self.with_backups = with_backups
        if self._held_backup and not self._is_registered:
            # the state may be obsolete; the coordinator's message about the place will show this
            self.server_index = server_index
        if (
            self.server_index is not None
            and server_index != self.server_index
            and not self._has_given_all()
        ):
            raise ConfigurationError(
                f"the coordinator registered this process as server {server_index} of job "
                f"{self._job_id!r}, but it holds the partitions of server {self.server_index}; "
                "start it with the data directory of its own server id, or with an empty one"
            )
        if self._is_registered and server_index != self.server_index:
            raise ConfigurationError(
                f"the coordinator registered this process as server {server_index} of job "
                f"{self._job_id!r}, but it was server {self.server_index} until other servers "
                "received its partitions; restart it with the same settings"
            )
        if self._layouts.current is not None and self._layouts.current.server_index != server_index:
            self._layouts.becomes(None)  # its former place no longer has partitions
        self.server_index, self._is_registered = server_index, True

    def _has_given_all(self) -> bool:
        """Returns whether this server has handed all its partitions over to other servers. The
        coordinator can then assign it a different place, like a new server."""
        leaving = frozenset() if self._moves.leaving is None else self._moves.leaving.partitions
        return leaving.issuperset(self._shard.partition_ids())

    def placed(self, place: Place) -> None:
        """Records the assigned place. Implements `Listener.placed`."""
        if place.epoch < self._epoch:
            logger.error(
                "the coordinator lost an epoch of this server's place",
                extra={"known": self._epoch, "told": place.epoch},
            )
            self._known.clear()  # a different server may have this server's place now
            return
        self._epoch = place.epoch
        if place.follows:
            logger.info("this server became a backup", extra={"epoch": place.epoch})
            self.replaced.set()
        elif not self._backup.placed(place):
            self._known.clear()
            return
        self._known.set()

    async def check(self) -> None:
        """Returns normally if this server must serve requests; otherwise raises UnavailableError /
        PLACE_UNKNOWN. If the coordinator has not assigned a place yet, waits for a short time."""
        if not self._known.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_PLACE_WAIT.total_seconds()):
                    await self._known.wait()
        if self.replaced.is_set() or not self._known.is_set() or self._backup.is_cut_off:
            raise UnavailableError(
                "this server does not know yet whether it or a backup must serve; ask the "
                "coordinator for the current server, and try again",
                reason="PLACE_UNKNOWN",
            )
