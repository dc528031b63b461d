"""Every change of a server's state on its way: checked, written to the journal, made. Belongs to
the event loop.

Without a data directory there is no journal, and a change is made at once.
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
"""How long a change may wait for a backup, before whoever waits is told to ask again."""


class Changes:
    """All changes of one server, in one order."""

    def __init__(
        self,
        *,
        shard: Shard,
        layout: Callable[[], Layout | None],
        members: Callable[[], Members],
        pending_limit: timedelta = PENDING_LIMIT,
    ) -> None:
        """`layout`, `members`: as they are now; the journal has them before anything that was done
        under them."""
        self._shard = shard
        self._pending_limit = pending_limit
        self._layout = layout
        self._members = members
        self._journal: Journal | None = None
        self._layout_written: Layout | None = None
        self._layout_on_its_way: Layout | None = None
        """The newest that `adopt` was called with."""
        self._members_due = True
        self._latest: dict[int, asyncio.Future[Outcome]] = {}
        """Partition -> the last change of it that is on its way, or was."""
        self._configured: asyncio.Future[None] | None = None
        """The last configuration that is on its way, or was."""

    def write_to(self, journal: Journal) -> None:
        """From now on."""
        self._journal = journal

    @property
    def write_error(self) -> Exception | None:
        """Why the journal's last write failed; None: it did not, or there is no journal. Any thread
        may ask."""
        return None if self._journal is None else self._journal.write_error

    def members_changed(self) -> None:
        """The journal is to have them before the next change."""
        self._members_due = True

    async def push(self, upload: Upload) -> asyncio.Future[Outcome]:
        """Admits a gradient; the future has what became of it, and is others' too: `shield` it.
        Raises as `Shard.admit_push`."""
        while self._shard.needs_trial(upload) and (before := self._on_their_way(upload)):
            await asyncio.wait(before)
        return await self._partition(upload, self._shard.admit_push(upload))

    async def quiet(self) -> None:
        """Waits for the changes of partitions that are on their way now. Raises UnavailableError
        when this server makes none any more."""
        if pending := [each for each in self._latest.values() if not each.done()]:
            await asyncio.wait(pending)
        if self.is_broken:
            raise UnavailableError(
                "this server ends, or another one has its place; try again",
                reason="SERVER_STOPPING",
            )

    async def in_time(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Awaits what waits for changes; it is cancelled and begun anew now and then. While changes
        wait for a backup, whoever waits for one is told to look for the server elsewhere: it may
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
                        f"a change has waited {limit_s:g} s for this server's backup; ask the "
                        "coordinator where the server is, and send it again",
                        reason="CHANGE_PENDING",
                    ) from error

    async def made(self, partition_ids: Iterable[int]) -> None:
        """Waits for what is on its way to these partitions, whatever becomes of it."""
        if pending := [
            latest
            for each in partition_ids
            if (latest := self._latest.get(each)) is not None and not latest.done()
        ]:
            await asyncio.wait(pending)

    async def restore(self, restoration: Restoration) -> asyncio.Future[Outcome]:
        """Admits rows that are to take the place of a bucket's. Raises as `Shard.check_open`."""
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
        """Raises as `Shard.check_open`."""
        self._shard.check_open(spec)

    def is_settled(self, push: UploadHeader) -> bool:
        """Whether the number of a push is used up, so that it will change nothing. Raises as
        `Shard.check_open`."""
        return self._shard.is_settled(push)

    async def initialize(self, upload: Upload) -> asyncio.Future[Outcome]:
        """Admits first values. Raises as `Shard.admit_values`."""
        return await self._partition(upload, self._shard.admit_values(upload))

    def configure(
        self, configuration: Configuration, effect: Callable[[], None]
    ) -> asyncio.Future[None]:
        """Calls `effect` once the journal has the configuration. The future fails with
        UnavailableError / JOURNAL_FAILED."""
        self._configured = self._make(configuration_record(configuration), effect)
        return self._configured

    def adopt(self, layout: Layout, effect: Callable[[], None]) -> asyncio.Future[None]:
        """Calls `effect`, by which partitions come and go, once the journal has the shard map that
        says so. The future fails as that of `configure`."""
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
        """Calls `effect` once the journal has what is said of partitions that move; `refused` where
        it cannot. The future fails as that of `configure`."""
        return self._make(record, effect, refused=refused)

    def in_order(self, look: Callable[[], T]) -> asyncio.Future[T]:
        """Calls `look` once all that was said to the journal before has been made. The future fails
        as that of `configure`."""
        return self._make(None, look)

    def clock(self, member_id: str, clock: int, *, place: int = 0) -> None:
        """A member's word on its clock, without a push, for the journal. Nobody waits for it: a
        member whose word is lost is held for slower than it is, until it speaks again."""
        if self._journal is not None:
            self._make(clock_record(member_id, clock, place=place), lambda: None)

    @property
    def holds(self) -> bool:
        """Changes wait for another server to have them."""
        return self._journal is not None and self._journal.holds

    def give_up(self, reason: UnavailableError) -> None:
        """Makes no change any more; whoever waits for one is told why."""
        if self._journal is not None:
            self._journal.give_up(reason)

    def begin_file(self, effect: Callable[[int], T]) -> asyncio.Future[T]:
        """See `Journal.rotate`; without a journal the number is 0."""
        if self._journal is None:
            return _done(effect(0))
        # The new file says first what the snapshot that begins with it may not know.
        self._layout_written, self._members_due = None, True
        return self._journal.rotate(effect)

    @property
    def is_broken(self) -> bool:
        """A change that the journal has could not be made: memory is not to be written anywhere."""
        return self._journal is not None and self._journal.is_broken

    @property
    def journal_bytes(self) -> int:
        """Written since the last `begin_file`."""
        return 0 if self._journal is None else self._journal.bytes_since_rotation

    async def close(self) -> None:
        """Waits for what is on its way. Nothing is to be changed after that."""
        if self._journal is not None:
            await self._journal.close()

    def _on_their_way(self, upload: Upload) -> list[asyncio.Future[Any]]:
        """What an update that is tried first has to wait for."""
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
        # With all that is on its way to the partition; what was applied before is known by its
        # number.
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
        """The journal never goes back to a map before one that is on its way."""
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
