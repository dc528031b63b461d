"""Makes every change to a server's state: checks it, writes it to the journal, and applies it.
Belongs to the event loop.

Without a data directory there is no journal, and changes are applied immediately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from typing import Any, Final, TypeVar

from shoal_common.errors import UnavailableError

from shoal_ps_server.configuration import Configuration
from shoal_ps_server.shard.layout import Layout, PartitionSpec
from shoal_ps_server.shard.payload import Upload, UploadHeader
from shoal_ps_server.shard.shard import Admitted, Outcome, Restoration, Shard
from shoal_ps_server.storage.image import Members
from shoal_ps_server.storage.journal import Journal
from shoal_ps_server.storage.record import Record
from shoal_ps_server.storage.recovery import (
    clock_record,
    configuration_record,
    layout_record,
    members_record,
    partition_record,
    restoration_record,
)

T = TypeVar("T")

PENDING_LIMIT: Final = timedelta(seconds=5)
"""Maximum time that a change waits for a backup before its callers get an error and must retry."""


class Changes:
    """All changes to one server's state, in a single order."""

    def __init__(
        self,
        *,
        shard: Shard,
        layout: Callable[[], Layout | None],
        members: Callable[[], Members],
        pending_limit: timedelta = PENDING_LIMIT,
    ) -> None:
        """`layout`, `members`: return the current shard map and the current members. The journal
        records these before any change that depends on them."""
        self._shard = shard
        self._pending_limit = pending_limit
        self._layout = layout
        self._members = members
        self._journal: Journal | None = None
        self._layout_written: Layout | None = None
        self._layout_on_its_way: Layout | None = None
        """Newest layout that was passed to `adopt`; None if there is none."""
        self._members_due = True
        self._latest: dict[int, asyncio.Future[Outcome]] = {}
        """Partition id -> last change to the partition, pending or complete."""
        self._configured: asyncio.Future[None] | None = None
        """Last change to the configuration, pending or complete."""

    def write_to(self, journal: Journal) -> None:
        """Sets the journal that changes are written to."""
        self._journal = journal

    @property
    def write_error(self) -> Exception | None:
        """Error of the journal's last write; None if it succeeded or there is no journal. May be
        read from any thread."""
        return None if self._journal is None else self._journal.write_error

    def members_changed(self) -> None:
        """Schedules a journal record of the members, which is written before the next change."""
        self._members_due = True

    async def push(self, upload: Upload) -> asyncio.Future[Outcome]:
        """Admits a gradient, and returns a future for its outcome. Several callers may share the
        future, so it must be awaited with `shield`. Raises the errors of `Shard.admit_push`."""
        while self._shard.needs_trial(upload) and (before := self._on_their_way(upload)):
            await asyncio.wait(before)
        return await self._partition(upload, self._shard.admit_push(upload))

    async def quiet(self) -> None:
        """Waits until all currently pending changes to partitions are done. Raises UnavailableError
        if this server no longer applies changes."""
        if pending := [each for each in self._latest.values() if not each.done()]:
            await asyncio.wait(pending)
        if self.is_broken:
            raise UnavailableError(
                "this server is stopping, or another one has taken its place; try again",
                reason="SERVER_STOPPING",
            )

    async def in_time(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Awaits `attempt`, which waits for changes, and returns its result. If this takes longer
        than the limit for pending changes, cancels the attempt and starts a new one.

        If changes are waiting for a backup at that time, raises UnavailableError / CHANGE_PENDING
        instead. The caller of the RPC then requests the server's address from the coordinator,
        because a different server may have replaced this server without this server noticing.
        """
        limit_s = self._pending_limit.total_seconds()
        while True:
            try:
                async with asyncio.timeout(limit_s) as limit:
                    return await attempt()
            except TimeoutError as error:
                if not limit.expired():
                    raise
                if self.holds:
                    raise UnavailableError(
                        f"a change waited {limit_s:g} s for this server's backup; ask the "
                        "coordinator for the current server, and send the change again",
                        reason="CHANGE_PENDING",
                    ) from error

    async def made(self, partition_ids: Iterable[int]) -> None:
        """Waits until the pending changes to these partitions are done, regardless of their
        outcomes."""
        if pending := [
            latest
            for each in partition_ids
            if (latest := self._latest.get(each)) is not None and not latest.done()
        ]:
            await asyncio.wait(pending)

    async def restore(self, restoration: Restoration) -> asyncio.Future[Outcome]:
        """Admits rows that replace a bucket's rows, and returns a future for the outcome. Raises
        the errors of `Shard.check_open`."""
        number = restoration.spec.partition_id
        while (latest := self._latest.get(number)) is not None and not latest.done():
            await asyncio.wait([latest])
        if not self._shard.admit_restoration(restoration):
            return _done(
                Outcome(partition_id=number, version=self._shard.version(number), duplicate=True)
            )
        made = self._make(
            None if self._journal is None else restoration_record(restoration),
            lambda: self._shard.restore(restoration),
            refused=lambda: self._shard.refuse_restoration(restoration),
        )
        self._latest[number] = made
        return made

    def check_open(self, spec: PartitionSpec) -> None:
        """Raises UnavailableError / PARTITION_MOVING while the partition is being moved to another
        server, and PreconditionError / STALE_SHARD_MAP once it has been moved."""
        self._shard.check_open(spec)

    def is_settled(self, push: UploadHeader) -> bool:
        """Returns whether the sequence number of a push is used up. The push will then have no
        effect. Raises the errors of `Shard.check_open`."""
        return self._shard.is_settled(push)

    async def initialize(self, upload: Upload) -> asyncio.Future[Outcome]:
        """Admits initial values, and returns a future for the outcome. Raises the errors of
        `Shard.admit_values`."""
        return await self._partition(upload, self._shard.admit_values(upload))

    def configure(
        self, configuration: Configuration, effect: Callable[[], None]
    ) -> asyncio.Future[None]:
        """Calls `effect` once the configuration is in the journal. Returns a future that fails with
        UnavailableError / JOURNAL_FAILED if it cannot be written."""
        self._configured = self._make(configuration_record(configuration), effect)
        return self._configured

    def adopt(self, layout: Layout, effect: Callable[[], None]) -> asyncio.Future[None]:
        """Calls `effect`, which adds and removes partitions, once the shard map `layout` is in the
        journal. Returns a future that fails with UnavailableError / JOURNAL_FAILED if it cannot be
        written."""
        if self._journal is None:
            effect()
            return _done(None)
        self._layout_written = self._layout_on_its_way = layout
        return self._journal.append(layout_record(layout), effect, refused=self._write_again)

    def move(
        self,
        record: Record,
        effect: Callable[[], None],
        *,
        refused: Callable[[], None] = lambda: None,
    ) -> asyncio.Future[None]:
        """Calls `effect` once a record about a move of partitions is in the journal, or `refused`
        if it cannot be written. Returns a future that then fails with UnavailableError /
        JOURNAL_FAILED."""
        return self._make(record, effect, refused=refused)

    def in_order(self, look: Callable[[], T]) -> asyncio.Future[T]:
        """Calls `look` once all earlier changes have been applied. Returns a future for its result;
        the future fails with UnavailableError / JOURNAL_FAILED if an earlier change could not be
        written."""
        return self._make(None, look)

    def clock(self, member_id: str, clock: int, *, place: int = 0) -> None:
        """Writes to the journal a clock that a member has reported without a push. Nothing waits
        for this record. If it is lost, the member's clock is too low until its next report."""
        if self._journal is not None:
            self._make(clock_record(member_id, clock, place=place), lambda: None)

    @property
    def holds(self) -> bool:
        """True if changes wait until another server has received them."""
        return self._journal is not None and self._journal.holds

    def give_up(self, reason: UnavailableError) -> None:
        """Stops applying changes. All callers waiting for a change get the error `reason`."""
        if self._journal is not None:
            self._journal.give_up(reason)

    def begin_file(self, effect: Callable[[int], T]) -> asyncio.Future[T]:
        """Starts a new journal file, like `Journal.rotate`. Without a journal, calls `effect` with
        the number 0."""
        if self._journal is None:
            return _done(effect(0))
        # The new file starts with records that a snapshot taken at this point may lack.
        self._layout_written, self._members_due = None, True
        return self._journal.rotate(effect)

    @property
    def is_broken(self) -> bool:
        """True if changes are no longer applied, because a change in the journal could not be
        applied or `give_up` was called. The state in memory may then lack changes, so it must not
        be written to a snapshot."""
        return self._journal is not None and self._journal.is_broken

    @property
    def journal_bytes(self) -> int:
        """Number of bytes written to the journal since the last `begin_file`."""
        return 0 if self._journal is None else self._journal.bytes_since_rotation

    async def close(self) -> None:
        """Waits for pending changes and closes the journal. No changes may be made after that."""
        if self._journal is not None:
            await self._journal.close()

    def _on_their_way(self, upload: Upload) -> list[asyncio.Future[Any]]:
        """Returns the pending changes that must be complete before the update of `upload` can be
        tried on copies."""
        changes = (self._latest.get(upload.header.spec.partition_id), self._configured)
        return [each for each in changes if each is not None and not each.done()]

    async def _partition(
        self, upload: Upload, admitted: Admitted | None
    ) -> asyncio.Future[Outcome]:
        number = upload.header.spec.partition_id
        if admitted is None:
            if (latest := self._latest.get(number)) is not None:
                await asyncio.wait([latest])
                latest.result()  # raises if the original of this retried push could not be written
            return _done(self._shard.known(upload.header))
        change = admitted
        made = self._make(
            None if self._journal is None else partition_record(change, upload),
            lambda: self._shard.apply(change),
            refused=lambda: self._refused(change),
        )
        self._latest[number] = made
        return made

    def _refused(self, change: Admitted) -> None:
        self._shard.refuse(change)
        # Waits for all pending changes to the partition; pushes already applied are recognized by
        # their numbers.
        self._latest.pop(change.header.spec.partition_id, None)

    def _make(
        self,
        record: Record | None,
        effect: Callable[[], T],
        *,
        refused: Callable[[], None] = lambda: None,
    ) -> asyncio.Future[T]:
        journal = self._journal
        if journal is None:
            return _done(effect())
        layout = self._newest_layout()
        if layout is not None and layout is not self._layout_written:
            self._layout_written = layout
            journal.append(layout_record(layout), lambda: None, refused=self._write_again)
        if self._members_due:
            self._members_due = False
            journal.append(members_record(self._members()), lambda: None, refused=self._write_again)
        return journal.append(record, effect, refused=refused)

    def _newest_layout(self) -> Layout | None:
        """Returns the newest layout, pending or complete. The journal never records an older shard
        map after a newer one."""
        layout, coming = self._layout(), self._layout_on_its_way
        return (
            coming
            if coming is not None and (layout is None or coming.epoch > layout.epoch)
            else layout
        )

    def _write_again(self) -> None:
        self._layout_written, self._layout_on_its_way, self._members_due = None, None, True


def _done(value: T) -> asyncio.Future[T]:
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future
