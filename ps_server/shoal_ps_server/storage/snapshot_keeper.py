"""Writes snapshots: on request, periodically, and at the end. Belongs to the event loop.

Partitions are copied one at a time between pushes, and a thread writes them to disk, so training
continues. Until the snapshot is written, one copy of the shard is in memory
(docs/explanation/parameter-servers.md#journal-and-snapshots).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from shoal_common.errors import PreconditionError, UnavailableError

from shoal_ps_server.metrics import Metrics
from shoal_ps_server.shard.partition import PartitionImage
from shoal_ps_server.shard.shard import Shard
from shoal_ps_server.storage.changes import Changes
from shoal_ps_server.storage.directory import DataDirectory
from shoal_ps_server.storage.image import ServerImage, ServerState
from shoal_ps_server.storage.moves import Moves, Taken
from shoal_ps_server.storage.snapshot import write_snapshot

logger = logging.getLogger(__name__)

_RETRY_AFTER: Final = timedelta(seconds=2)
"""Suggested delay before a client retries. A full disk is unlikely to have free space sooner."""
_LOOK_S: Final = 1.0
"""Interval in seconds between checks of the journal's size."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A snapshot that has been written."""

    path: Path
    nbytes: int


class SnapshotKeeper:
    """Writes one snapshot at a time."""

    def __init__(
        self,
        *,
        directory: DataDirectory | None,
        shard: Shard,
        moves: Moves,
        state: Callable[[], ServerState | None],
        changes: Changes,
        metrics: Metrics,
        journal_limit: int,
    ) -> None:
        """`state`: returns the server's state without its partitions; None while the server does
        not know its partitions. `journal_limit`: size of the journal in bytes above which a
        snapshot is due, provided that the journal is also more than four times as large as the
        server's state."""
        self._directory = directory
        self._shard = shard
        self._moves = moves
        moves.before_drop = self._copy_now
        self._state = state
        self._changes = changes
        self._journal_limit = journal_limit
        self._metrics = metrics
        self._writing = asyncio.Lock()
        self._on_disk: asyncio.Future[int] | None = None
        """Result of the writing thread; `_forgetting`: result of the thread that removes files made
        obsolete by a snapshot."""
        self._forgetting: asyncio.Future[None] | None = None
        self._last: tuple[object, ...] = ()
        self._begun = _Begun()
        """Data copied so far for the snapshot in progress."""

    async def write(self) -> Written:
        """Writes a snapshot now, and returns once it is on disk.

        Raises PreconditionError (SNAPSHOTS_OFF without a data directory, TENSORS_UNDECLARED while
        there are no partitions) and UnavailableError: SNAPSHOT_FAILED or JOURNAL_FAILED if the disk
        does not accept the data. The previous snapshot is then kept.
        """
        if self._directory is None:
            raise PreconditionError(
                "this server has no data directory; start it with --data-dir",
                reason="SNAPSHOTS_OFF",
            )
        async with self._writing:
            if self._state() is None:
                raise PreconditionError(
                    "this server has no partitions yet; declare the job's tensors first",
                    reason="TENSORS_UNDECLARED",
                )
            started = time.perf_counter()
            # Later changes are in the new journal file, earlier changes in the partitions copied
            # now.
            state = await asyncio.shield(self._changes.begin_file(self._state_at))
            partitions = await self._capture()
            if state.configuration is None and (now := self._state()) is not None:
                # this is the first journal file, so there were no pushes before it
                state = replace(state, configuration=now.configuration)
            if self._changes.is_broken:
                raise UnavailableError(
                    "this server is exiting and will recover when it is restarted; try again",
                    reason="SERVER_STOPPING",
                )
            image = ServerImage(
                state=state,
                partitions=partitions,
                taken=self._begun.taken,
                coming=self._begun.coming,
            )
            self._begun = _Begun()
            if self._on_disk is not None:
                # Cancelling the caller did not stop the thread, which is still writing the same
                # temporary file.
                await asyncio.wait([self._on_disk])
            self._on_disk = asyncio.get_running_loop().run_in_executor(
                None, write_snapshot, self._directory.snapshot, image
            )
            try:
                nbytes = await asyncio.shield(self._on_disk)
            except OSError as error:
                self._metrics.snapshot_failures.inc()
                raise UnavailableError(
                    f"could not write the snapshot to {self._directory.path}: {error}; free some "
                    "space on its disk",
                    reason="SNAPSHOT_FAILED",
                    retry_after=_RETRY_AFTER,
                ) from error
            await self._forget_journal_before(state.journal)
            self._last = _fingerprint(
                image.state,
                {
                    each.spec.partition_id: (each.version, each.restoration)
                    for each in image.partitions
                },
            )
            self._metrics.snapshot_written(nbytes=nbytes, seconds=time.perf_counter() - started)
            logger.info(
                "snapshot written", extra={"path": self._directory.snapshot, "bytes": nbytes}
            )
            return Written(path=self._directory.snapshot, nbytes=nbytes)

    async def write_if_changed(self) -> None:
        """Writes a snapshot if there is state to write and it has changed since the last snapshot.
        Raises UnavailableError like `write`."""
        state = self._state()
        if self._directory is None or state is None:
            return
        held = self._shard.summary()
        versions = {
            number: (version, held.restorations.get(number, 0))
            for number, version in held.versions.items()
            if version
        }
        if _fingerprint(state, versions) == self._last:
            return
        await self.write()

    async def idle(self) -> None:
        """Waits until no thread of this keeper uses the data directory. No snapshot may be
        requested during the wait."""
        threads: list[asyncio.Future[Any]] = [
            each for each in (self._on_disk, self._forgetting) if each is not None
        ]
        if threads:
            await asyncio.wait(threads)

    async def periodically(self, interval: timedelta) -> None:
        """Writes a snapshot every `interval` (0: never), and whenever the journal has grown enough,
        until cancelled. Failures are logged and counted; training continues."""
        loop = asyncio.get_running_loop()
        due = loop.time() + interval.total_seconds() if interval else float("inf")
        while True:
            await asyncio.sleep(min(_LOOK_S, max(0.0, due - loop.time())))
            if loop.time() < due and not self._journal_is_long():
                continue
            try:
                await self.write_if_changed()
            except UnavailableError as error:
                logger.error("snapshot failed", extra={"error": error})
            due = loop.time() + interval.total_seconds() if interval else float("inf")

    def _journal_is_long(self) -> bool:
        written = self._changes.journal_bytes
        return written >= self._journal_limit and written >= 4 * self._shard.summary().stored_bytes

    def _state_at(self, journal_file: int) -> ServerState:
        state, moves = self._state(), self._moves
        assert state is not None, "what is known of the partitions is not forgotten"
        # Partitions handed over by other servers change once they belong to this server and are
        # served.
        taken, coming = (
            None if each is None else each.copy() for each in (moves.taken, moves.coming)
        )
        self._begun = _Begun(due=set(self._shard.partition_ids()), taken=taken, coming=coming)
        return replace(state, batches=self._shard.batches.runs(), journal=journal_file)

    async def _forget_journal_before(self, number: int) -> None:
        assert self._directory is not None
        if not number:
            return
        try:
            self._forgetting = asyncio.get_running_loop().run_in_executor(
                None, self._directory.forget_journal_before, number
            )
            await asyncio.shield(self._forgetting)
        except OSError as error:
            logger.error(
                "could not remove obsolete journal files",
                extra={"error": error},
            )

    async def _capture(self) -> tuple[PartitionImage, ...]:
        """Returns copies of all partitions as they were at the beginning of the current journal
        file, including partitions that move to another server during the capture."""
        begun = self._begun
        while begun.due:
            self._copy_now([min(begun.due)])
            await asyncio.sleep(0)  # lets pushes and pulls proceed in between
        return tuple(begun.images)

    def _copy_now(self, partition_ids: Collection[int]) -> None:
        for partition_id in self._begun.due.intersection(partition_ids):
            self._begun.due.remove(partition_id)
            if (image := self._shard.image(partition_id)) is not None:
                self._begun.images.append(image)


@dataclass(kw_only=True)
class _Begun:
    due: set[int] = field(default_factory=set)
    """Partitions that have not been copied yet."""
    images: list[PartitionImage] = field(default_factory=list)
    taken: Taken | None = None
    coming: Taken | None = None


def _fingerprint(state: ServerState, versions: dict[int, tuple[int, int]]) -> tuple[object, ...]:
    """Returns a value for comparison with an earlier result. The two differ if any value of the
    server has changed in between."""
    return versions, state.configuration, state.layout.epoch
