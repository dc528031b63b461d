"""Path of every change of a server's state: checks it, writes it to the journal, makes it. Belongs
to the event loop.

Without a data directory there is no journal, and changes are made at once.
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
"""Time for which a change may wait for a backup before its waiters are told to retry."""


class Changes:
    """All changes of one server, in a single order."""

    def __init__(
        self,
        *,
        shard: Shard,
        layout: Callable[[], Layout | None],
        members: Callable[[], Members],
        pending_limit: timedelta = PENDING_LIMIT,
    ) -> None:
        """`layout`, `members`: return the current ones; the journal records them before any change
        made under them."""
        self._shard = shard
        self._pending_limit = pending_limit
        self._layout = layout
        self._members = members
        self._journal: Journal | None = None
        self._layout_written: Layout | None = None
        self._layout_on_its_way: Layout | None = None
        """Newest layout passed to `adopt`."""
        self._members_due = True
        self._latest: dict[int, asyncio.Future[Outcome]] = {}
        """Partition -> its latest change, pending or not."""
        self._configured: asyncio.Future[None] | None = None
        """The latest change of the configuration, pending or not."""

    def write_to(self, journal: Journal) -> None:
        """Sets the journal to write to."""
        self._journal = journal

    @property
    def write_error(self) -> Exception | None:
        """Error of the journal's last write; None if it succeeded or there is no journal. May be
        read on any thread."""
        return None if self._journal is None else self._journal.write_error

    def members_changed(self) -> None:
        """Schedules a journal record of the members before the next change."""
        self._members_due = True

    async def push(self, upload: Upload) -> asyncio.Future[Outcome]:
        """Admits a gradient. The returned future has its outcome and is shared, so `shield` it.
        Raises like `Shard.admit_push`."""
        while self._shard.needs_trial(upload) and (before := self._on_their_way(upload)):
            await asyncio.wait(before)
        return await self._partition(upload, self._shard.admit_push(upload))

    async def quiet(self) -> None:
        """Waits for the currently pending changes of partitions. Raises UnavailableError if this
        server makes no more changes."""
        if pending := [each for each in self._latest.values() if not each.done()]:
            await asyncio.wait(pending)
        if self.is_broken:
            raise UnavailableError(
                "this server is stopping, or another one has taken its place; try again",
                reason="SERVER_STOPPING",
            )

    async def in_time(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Awaits `attempt`, which waits for changes, and periodically cancels and restarts it.
        While changes wait for a backup, waiters are told to look for the server elsewhere: it may
        have been replaced without knowing it.

        Raises UnavailableError / CHANGE_PENDING.
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
        """Waits for the pending changes of these partitions, whatever their outcome."""
        if pending := [
            latest
            for each in partition_ids
            if (latest := self._latest.get(each)) is not None and not latest.done()
        ]:
            await asyncio.wait(pending)

    async def restore(self, restoration: Restoration) -> asyncio.Future[Outcome]:
        """Admits rows that replace those of a bucket. Raises like `Shard.check_open`."""
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
        """Raises like `Shard.check_open`."""
        self._shard.check_open(spec)

    def is_settled(self, push: UploadHeader) -> bool:
        """Returns whether the number of a push is used up, so that it will change nothing. Raises
        like `Shard.check_open`."""
        return self._shard.is_settled(push)

    async def initialize(self, upload: Upload) -> asyncio.Future[Outcome]:
        """Admits first values. Raises like `Shard.admit_values`."""
        return await self._partition(upload, self._shard.admit_values(upload))

    def configure(
        self, configuration: Configuration, effect: Callable[[], None]
    ) -> asyncio.Future[None]:
        """Calls `effect` once the journal has the configuration. The future fails with
        UnavailableError / JOURNAL_FAILED."""
        self._configured = self._make(configuration_record(configuration), effect)
        return self._configured

    def adopt(self, layout: Layout, effect: Callable[[], None]) -> asyncio.Future[None]:
        """Calls `effect`, which adds and removes partitions, once the journal has the corresponding
        shard map. The future fails like that of `configure`."""
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
        """Calls `effect` once the journal has a record about moving partitions, or `refused` if it
        cannot be written. The future fails like that of `configure`."""
        return self._make(record, effect, refused=refused)

    def in_order(self, look: Callable[[], T]) -> asyncio.Future[T]:
        """Calls `look` once everything passed to the journal before has been made. The future fails
        like that of `configure`."""
        return self._make(None, look)

    def clock(self, member_id: str, clock: int, *, place: int = 0) -> None:
        """Writes a member's clock reported without a push to the journal. Nobody waits for it: if
        it is lost, the member is considered slower than it is until its next report."""
        if self._journal is not None:
            self._make(clock_record(member_id, clock, place=place), lambda: None)

    @property
    def holds(self) -> bool:
        """True if changes wait for another server to have them."""
        return self._journal is not None and self._journal.holds

    def give_up(self, reason: UnavailableError) -> None:
        """Stops making changes; waiters get the reason."""
        if self._journal is not None:
            self._journal.give_up(reason)

    def begin_file(self, effect: Callable[[int], T]) -> asyncio.Future[T]:
        """Begins a journal file, like `Journal.rotate`; without a journal the number is 0."""
        if self._journal is None:
            return _done(effect(0))
        # The new file starts with what the snapshot taken at its beginning may lack.
        self._layout_written, self._members_due = None, True
        return self._journal.rotate(effect)

    @property
    def is_broken(self) -> bool:
        """True if a change in the journal could not be made, so that the in-memory state must not
        be written anywhere."""
        return self._journal is not None and self._journal.is_broken

    @property
    def journal_bytes(self) -> int:
        """Bytes written since the last `begin_file`."""
        return 0 if self._journal is None else self._journal.bytes_since_rotation

    async def close(self) -> None:
        """Waits for pending changes. No change may follow."""
        if self._journal is not None:
            await self._journal.close()

    def _on_their_way(self, upload: Upload) -> list[asyncio.Future[Any]]:
        """Returns the changes that an update to be tried first has to wait for."""
        changes = (self._latest.get(upload.header.spec.partition_id), self._configured)
        return [each for each in changes if each is not None and not each.done()]

    async def _partition(
        self, upload: Upload, admitted: Admitted | None
    ) -> asyncio.Future[Outcome]:
        number = upload.header.spec.partition_id
        if admitted is None:
            if (latest := self._latest.get(number)) is not None:
                await asyncio.wait([latest])
                latest.result()  # what it is a duplicate of may not have been written
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
        # With everything pending for the partition; applied pushes are known by their numbers.
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
        """Returns the newest layout. The journal never goes back to a map before a pending one."""
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
