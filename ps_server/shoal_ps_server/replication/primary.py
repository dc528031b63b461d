"""Primary's side of a backup: decides what to send to the backup, and when changes must wait for
it. Belongs to the event loop.

A new backup first receives the current state, partition by partition between pushes, and all
changes made while it is copied. Once the backup has confirmed that all this is on its disk, the
journal starts to delay the effect of each change until the backup has received the change too. The
coordinator is notified that the backup is in sync. From then on, only the coordinator can stop this
delay, with a new epoch of the place, because it may have made the backup the primary.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

from shoal_common.errors import InvalidRequestError, PreconditionError, ShoalError, UnavailableError
from shoal_common.failpoints import failpoint
from shoal_common.tasks import end_tasks
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.metrics import Metrics
from shoal_ps_server.replication.items import FORMAT_VERSION, PARTITION, STATE, WHOLE, Item
from shoal_ps_server.session import Place
from shoal_ps_server.shard.shard import Shard
from shoal_ps_server.storage.image import ServerState, dumps, layout_from_json, state_to_json
from shoal_ps_server.storage.journal import Journal
from shoal_ps_server.storage.moves import Moves
from shoal_ps_server.storage.record import Record
from shoal_ps_server.storage.recovery import BACKUP, LAYOUT, VALUES, backup_record, moves_records
from shoal_ps_server.storage.snapshot import partition_to_bytes

logger = logging.getLogger(__name__)

PATIENCE: Final = timedelta(seconds=2)
"""Maximum time for a backup to confirm a change before the coordinator is asked to drop the
backup."""
_LOOK_S: Final = 0.1
_MOST_BEHIND_BYTES: Final = 512 << 20
"""Maximum bytes of changes queued for a backup that is not in sync yet. A backup that falls further
behind starts over."""
_MOST_COPIED_BYTES: Final = 64 << 20
"""Maximum bytes of copied state waiting to be sent."""


@dataclass(eq=False, kw_only=True)
class _Stream:
    """Data to send to one backup. Implements the journal's `Follower`."""

    server_id: str
    epoch: int
    items: deque[Item] = field(default_factory=deque)
    nbytes: int = 0
    """Total size in bytes of the payloads in `items`."""
    due: set[int] = field(default_factory=set)
    """Partitions that have not been copied yet. Changes made to a partition before it is copied are
    part of the copy."""
    position: int = 0
    """Position of the last queued record; `confirmed`: position of the last record confirmed by the
    backup."""
    confirmed: int = 0
    moved_at: float = 0.0
    """Time of the last confirmation or, if later, of the first record queued after everything had
    been confirmed."""
    whole: bool = False
    """True if the backup has written the complete copied state to disk."""
    in_sync: bool = False
    """True if the backup has received all acknowledged changes, and the coordinator has been
    notified."""
    failure: ShoalError | None = None
    """Reason why the stream was closed; None while it is open."""
    failed_at: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def made(self, record: Record) -> None:
        """Implements `Follower.made`: queues a record of a change that has been applied. Drops the
        record if its partition will be copied later, because the copy contains the change."""
        if record.kind == LAYOUT:
            # a leaving partition need not be sent; if it returns, its records are complete
            self.due.intersection_update(layout_from_json(record.fields).partitions)
        if record.fields.get("partition") not in self.due:
            if record.kind == VALUES:
                # the payload is the partition's own memory, which will change
                record = replace(record, payload=memoryview(bytes(record.payload)))
            self.written(record)
            if self.nbytes > _MOST_BEHIND_BYTES:
                self.end(
                    UnavailableError(
                        f"the backup is {self.nbytes} bytes behind; it must copy everything again",
                        reason="BACKUP_BEHIND",
                    )
                )

    def written(self, record: Record) -> int:
        """Implements `Follower.written`: queues a record, and returns its position in the
        stream."""
        if record.kind != BACKUP:
            if self.confirmed == self.position:
                self.moved_at = asyncio.get_running_loop().time()
            self.position += 1
            self.put(Item.of_record(record, self.position))
        return self.position

    def put(self, item: Item) -> None:
        self.items.append(item)
        self.nbytes += item.payload.nbytes
        self.changed.set()

    def take(self) -> Item:
        item = self.items.popleft()
        self.nbytes -= item.payload.nbytes
        return item

    def end(self, failure: ShoalError) -> None:
        if self.failure is None:
            self.failure, self.failed_at = failure, asyncio.get_running_loop().time()
        self.changed.set()


class Backup:
    """A primary's view of its backup. Sends the backup the state and all changes, and keeps track
    of whether the backup is in sync."""

    def __init__(
        self,
        *,
        shard: Shard,
        moves: Moves,
        state: Callable[[], ServerState | None],
        report: Callable[[int, bool, str], None],
        metrics: Metrics,
        noted: str,
        patience: timedelta = PATIENCE,
    ) -> None:
        """Prepares to serve a backup.

        Args:
            shard, moves: state of the server.
            state: returns the server's state except its partitions.
            report: reports to the coordinator: the epoch of the place, whether the backup is in
                sync, and the reason if it is not.
            metrics: metrics of the server.
            noted: id in the journal's last backup record: the backup that had to confirm each
                change before it was applied. Empty if there is none.
            patience: time for the backup to confirm a change before the coordinator is asked to
                drop it.
        """
        self._shard = shard
        self._moves = moves
        self._state = state
        self._report = report
        self._metrics = metrics
        self._patience_s = patience.total_seconds()
        self._journal: Journal | None = None
        self._place: Place | None = None
        self._stream: _Stream | None = None
        """The open stream to the backup; None if there is none."""
        self._held: _Stream | None = None
        """Stream, open or closed, that delays the effects of changes in the journal, until the
        coordinator decides otherwise."""
        self.noted = noted
        """Id in the journal's last backup record, which names the backup that must receive every
        change; empty if there is none."""
        self._noting: asyncio.Future[None] | None = None
        """Write of the latest backup record to the journal, complete or in progress."""

    def write_to(self, journal: Journal) -> None:
        """Sets the journal that the backup follows."""
        self._journal = journal

    @property
    def is_cut_off(self) -> bool:
        """True if the backup has been unreachable for `patience` and the coordinator has not
        dropped it. The backup may then have become the primary."""
        failed = None if self._held is None or self._held.failure is None else self._held.failed_at
        return failed is not None and asyncio.get_running_loop().time() - failed > self._patience_s

    def placed(self, place: Place) -> bool:
        """Applies the coordinator's message that this server is the primary. Returns False if the
        coordinator wrongly considers a backup in sync; this server must then not serve until that
        backup is dropped.

        The message is repeated whenever the session is reopened; this server then reports the
        backup's state again.
        """
        self._place = place
        self._metrics.backup_in_sync.set(place.in_sync)
        if self._stream is not None and self._stream.epoch != place.epoch:
            self._stream.end(self._not_the_place(self._stream.epoch))
        if self._held is not None and place.epoch != self._held.epoch:
            logger.warning(
                "released the changes that were waiting for the backup",
                extra={"backup": self._held.server_id, "epoch": place.epoch},
            )
            self._let_go()
        if self._held is None:
            if place.in_sync:
                self._report(place.epoch, False, "its primary was restarted")
                return False
            if (
                self.noted and not self._is_noting
            ):  # the backup was dropped, or its process has exited
                self._note("")
        elif self._held.failure is not None:
            self._report(place.epoch, False, str(self._held.failure))
        elif self._held.in_sync and not place.in_sync:
            self._report(place.epoch, True, "")
        return True

    def stop(self) -> None:
        """Closes the stream to the backup, and fails the changes that are still waiting for its
        confirmation. If the backup is in sync, the coordinator promotes it. It does not need these
        changes, because their senders have not received a result."""
        stopping = UnavailableError("this server is stopping; try again", reason="SERVER_STOPPING")
        if self._held is not None and self._journal is not None:
            self._journal.give_up(stopping)
        if self._stream is not None:
            self._stream.end(stopping)

    async def serve(
        self, begin: pb.FollowBegin, requests: AsyncIterator[pb.FollowRequest]
    ) -> AsyncGenerator[bytes]:
        """Serves one Follow stream. `begin`: the stream's first message. Yields encoded
        FollowChunks. Raises the errors documented in the .proto."""
        stream = self._open(begin)
        tasks = [
            asyncio.create_task(self._read(stream, requests)),
            asyncio.create_task(self._copy(stream)),
            asyncio.create_task(self._watch(stream)),
        ]
        for task in tasks:
            task.add_done_callback(lambda _: stream.changed.set())
        try:
            while True:
                stream.changed.clear()
                while stream.items and stream.failure is None:
                    for chunk in stream.take().encoded():
                        yield chunk
                for task in tasks:
                    if task.done():
                        task.result()
                if stream.failure is not None:
                    raise stream.failure
                await stream.changed.wait()
        except ShoalError as error:
            self._fail(stream, error)
            raise
        finally:
            self._fail(stream, UnavailableError("the connection broke", reason="SESSION_BROKEN"))
            self._ended(stream)
            await end_tasks(tasks)

    def _open(self, begin: pb.FollowBegin) -> _Stream:
        if begin.format != FORMAT_VERSION:
            raise PreconditionError(
                f"format={begin.format}: this server's release uses {FORMAT_VERSION}; run a "
                "primary and its backup with the same release",
                reason="FORMAT_UNSUPPORTED",
            )
        place, state = self._place, self._state()
        if place is None or (place.epoch, place.backup_id) != (begin.epoch, begin.server_id):
            raise self._not_the_place(begin.epoch)
        if place.in_sync or self._held is not None or self._is_noting:
            # the backup may have changes that this server lacks
            raise self._not_the_place(begin.epoch)
        if state is None or (state.configuration is None and state.layout.partitions):
            raise UnavailableError(
                "this server has no partitions or no optimizer yet; try again",
                reason="PLACE_UNKNOWN",
            )
        if self._stream is not None:
            self._stream.end(
                UnavailableError("the backup opened a newer stream", reason="SESSION_REPLACED")
            )
        self._stream = _Stream(
            server_id=begin.server_id, epoch=begin.epoch, moved_at=asyncio.get_running_loop().time()
        )
        logger.info(
            "a backup started to follow", extra={"backup": begin.server_id, "epoch": begin.epoch}
        )
        return self._stream

    def _not_the_place(self, epoch: int) -> UnavailableError:
        known = (
            "nothing yet"
            if self._place is None
            else f"epoch {self._place.epoch} and backup {self._place.backup_id or 'none'}"
        )
        return UnavailableError(
            f"epoch={epoch}: the coordinator has assigned this server {known}; wait for its next "
            "assignment",
            reason="PLACE_UNKNOWN",
        )

    # ----------------------------------------------------------------------- while a stream is open

    async def _copy(self, stream: _Stream) -> None:
        """Sends the current state to the backup. Once the backup has stored it, makes the journal
        delay the effect of each change until the backup has confirmed the change."""
        assert self._journal is not None, "a server that may have a backup has a journal"
        journal = self._journal

        def begin() -> ServerState:
            if self._is_open(stream):
                journal.follow(stream)
                stream.due.update(self._shard.partition_ids())
                for record in moves_records(self._moves):
                    stream.written(record)
            state = self._state()
            assert state is not None, "what is known of the partitions is not forgotten"
            return state

        state = dumps(state_to_json(await asyncio.shield(journal.append(None, begin))))
        stream.put(Item(kind=STATE, payload=memoryview(state.encode())))
        for partition_id in sorted(stream.due):
            if partition_id not in stream.due:
                continue  # already sent, because it received a push
            stream.due.remove(partition_id)
            if (image := self._shard.image(partition_id)) is not None:
                entry, data = partition_to_bytes(image)
                stream.put(Item(kind=PARTITION, fields=entry, payload=memoryview(data)))
            await self._until(stream, lambda: stream.nbytes < _MOST_COPIED_BYTES)
        # Pushes to a partition before its turn may have reported finished batches.
        stream.put(Item(kind=WHOLE, fields={"batches": self._shard.batches.runs()}))
        await self._until(stream, lambda: stream.whole)
        failpoint("backup.before_note")
        await asyncio.shield(self._note(stream.server_id, lambda: self._hold(stream)))
        behind = stream.position
        await self._until(stream, lambda: stream.confirmed >= behind)
        failpoint("backup.holds")
        stream.in_sync = True
        logger.info(
            "the backup is in sync", extra={"backup": stream.server_id, "epoch": stream.epoch}
        )
        self._report(stream.epoch, True, "")

    async def _read(self, stream: _Stream, requests: AsyncIterator[pb.FollowRequest]) -> None:
        async for request in requests:
            if request.WhichOneof("message") != "kept" or request.kept.position > stream.position:
                raise InvalidRequestError(
                    f"unexpected message in a Follow stream: {request}; expected `kept`, up to "
                    f"{stream.position}"
                )
            stream.whole |= request.kept.whole
            if request.kept.position > stream.confirmed:
                stream.confirmed = request.kept.position
                stream.moved_at = asyncio.get_running_loop().time()
                if self._held is stream and self._journal is not None:
                    self._journal.confirm(stream.confirmed)
            stream.changed.set()
        raise UnavailableError("the backup ended its stream", reason="SESSION_ENDED")

    async def _watch(self, stream: _Stream) -> None:
        """Closes a stream whose backup is too slow, even if nothing can be sent to it, so that the
        backup cannot delay the workers for long."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_S)
            waits = self._held is stream and stream.confirmed < stream.position
            if waits and loop.time() - stream.moved_at > self._patience_s:
                self._fail(
                    stream,
                    UnavailableError(
                        f"the backup confirmed nothing for {self._patience_s:g} s",
                        reason="BACKUP_BEHIND",
                    ),
                )
                return

    async def _until(self, stream: _Stream, condition: Callable[[], bool]) -> None:
        """Waits until `condition` holds, without blocking pushes and pulls. If the stream is
        closed, raises the reason."""
        await asyncio.sleep(0)
        while not condition():
            if stream.failure is not None:
                raise stream.failure
            await asyncio.sleep(0.005)

    def _is_open(self, stream: _Stream) -> bool:
        return self._stream is stream and stream.failure is None

    def _fail(self, stream: _Stream, failure: ShoalError) -> None:
        """Closes a stream with an error. If changes are waiting for this stream's backup, asks the
        coordinator to drop the backup; only the first call for a stream does so."""
        if stream.failure is None and self._held is stream:
            logger.warning(
                "the backup stopped following; changes wait until it is dropped",
                extra={"reason": failure},
            )
            self._report(stream.epoch, False, str(failure))
        stream.end(failure)

    def _ended(self, stream: _Stream) -> None:
        stream.items.clear()
        if self._stream is stream:
            self._stream = None
            if self._held is None and self._journal is not None:
                self._journal.follow_no_more()

    # ----------------------------------------------------------------------------- delaying changes

    @property
    def _is_noting(self) -> bool:
        return self._noting is not None and not self._noting.done()

    def _hold(self, stream: _Stream) -> None:
        """Delays the effect of each change until the backup has confirmed it. Called once the
        journal has written the record that names this backup. If the stream has been closed by
        then, appends a record that names no backup instead."""
        if not self._is_open(stream):
            # the stream has been closed, and the coordinator was not notified that the backup is in
            # sync
            self._note("")
            return
        assert self._journal is not None
        self._held = stream
        self._journal.hold(position=stream.position, confirmed=stream.confirmed)

    def _let_go(self) -> None:
        self._held = None
        if self._journal is not None:
            self._journal.follow_no_more()
        self._note("")

    def _note(
        self, server_id: str, effect: Callable[[], None] = lambda: None
    ) -> asyncio.Future[None]:
        """Appends a journal record with the id of the backup that must confirm each change before
        it takes effect; an empty `server_id` means none. `effect`: called once the record is
        written. If the last such record names a backup, a restarted server must ask the coordinator
        before it serves, because the backup may have taken over."""
        assert self._journal is not None

        def written() -> None:
            self.noted = server_id
            effect()

        self._noting = self._journal.append(backup_record(server_id), written)
        return self._noting
