"""A server in the role of a backup: follows its primary and does not serve workers. Belongs to the
event loop.

A backup keeps its old state until a primary has sent its complete state. Until then, the backup may
have to continue with its old state, if it is promoted because the primary is lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry
from shoal_common.backoff import Backoff
from shoal_common.errors import CorruptDataError, InternalError, ShoalError, UnavailableError
from shoal_common.failpoints import failpoint
from shoal_common.formats.runs import Run
from shoal_common.rpc.channel import aio_channel
from shoal_common.rpc.status import from_rpc_error
from shoal_common.tasks import end_tasks
from shoal_common.telemetry import serve_metrics
from shoal_common.telemetry.loop_watch import LoopWatch
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.metrics import Metrics
from shoal_ps_server.replication.items import (
    FORMAT_VERSION,
    PARTITION,
    RECORD,
    STATE,
    WHOLE,
    Item,
    received_items,
)
from shoal_ps_server.session import CoordinatorSession, Known, MoveOrder, Place, this_process
from shoal_ps_server.settings import PsServerSettings
from shoal_ps_server.shard.partition import PartitionImage
from shoal_ps_server.storage.changes import Changes
from shoal_ps_server.storage.directory import DataDirectory
from shoal_ps_server.storage.image import ServerImage, ServerState, state_from_json
from shoal_ps_server.storage.journal import Journal
from shoal_ps_server.storage.record import Record
from shoal_ps_server.storage.recovery import Recovered, Replay
from shoal_ps_server.storage.snapshot import partition_from_bytes, write_snapshot
from shoal_ps_server.storage.snapshot_keeper import SnapshotKeeper

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S: Final = 0.1
_LONGEST_BACKOFF_S: Final = 2.0
_DIVERGED: Final = "BACKUP_DIVERGED"
"""Reason of the error raised if a change could not be applied: this server is then no longer a copy
of the primary."""
_DIVERGED_AGAIN_S: Final = 30.0
"""Seconds to wait before following again after a change could not be applied. A new full copy costs
the primary as much as the first one, and may fail in the same way."""
_FIRST_FILE: Final = 1
"""Number of the first journal file of a copy."""
_MOST_WAITING_BYTES: Final = 1 << 30
"""Maximum bytes of changes kept in memory while the copied state is being written to disk."""
_FOLLOW: Final = "/shoal.v1.ParameterServer/Follow"


class Standby:
    """A server while it has the role of a backup. Must be created and run on one event loop."""

    def __init__(self, settings: PsServerSettings, directory: DataDirectory) -> None:
        self._settings = settings
        self._directory = directory
        self._registry = CollectorRegistry()
        self._metrics = Metrics(self._registry)
        self._metrics.watch_disk(directory.path)
        self._place: Place | None = None
        self._moved = asyncio.Event()
        """Event that is set, and replaced by a new one, when the coordinator sends a message about
        this server's place."""
        self._copy: _Copy | None = None
        """Copy of the primary's state; None until it is complete."""
        self._keeping: asyncio.Task[None] | None = None
        """Task that replaces this server's state with the state of the primary. It runs to
        completion even if the stream is closed."""
        self._not_before = 0.0
        """Earliest time, by the loop's clock, at which this server may follow again, even under a
        different primary or epoch."""

    async def run(self, stop: asyncio.Event) -> Recovered | None:
        """Follows primaries until this server is promoted, and returns its state at that time.
        Returns None if `stop` is set or the job has ended.

        Raises:
            AnotherRunError: the run that this server's state belongs to has ended or is lost.
            CorruptDataError: this server is promoted with earlier state that it cannot read.
            InternalError: this server is promoted although a change could not be applied.
            ShoalError: the coordinator refused this server's registration.
        """
        async with AsyncExitStack() as stack:
            watch = LoopWatch(f"parameter server {self._settings.server_id}", self._registry)
            stack.callback(watch.close)
            http = stack.enter_context(
                serve_metrics(
                    str(self._settings.http),
                    self._registry,
                    tokens=self._settings.token_table,
                    job=self._settings.job,
                )
            )
            session = CoordinatorSession(
                self._settings.channel(str(self._settings.coordinator)),
                this_process(
                    self._settings,
                    address="",
                    metrics_address=self._settings.advertised_http(http.port),
                    run=self._directory.run,
                ),
                self,
            )
            stack.push_async_callback(session.close)
            tasks: list[asyncio.Task[object]] = [
                asyncio.create_task(self._follow()),
                asyncio.create_task(session.run()),
                asyncio.create_task(stop.wait()),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end_tasks(tasks)
                await self._kept()
            for task in done:
                task.result()
            if tasks[0] not in done:
                if self._copy is not None:
                    await self._copy.close()
                return None
        failpoint("backup.promoted")
        if self._copy is None:
            logger.warning("became the primary of an empty place")
            return self._directory.recover(
                job_id=self._settings.job, server_id=self._settings.server_id
            )
        return await self._copy.taken_over()

    # ------------------------------------------------------------------- the coordinator's listener

    def welcomed(self, server_index: int, *, with_backups: bool, run: Run | None) -> None:
        """Records the run of the opened session."""
        if run is not None:
            self._directory.note_run(run)
        self._metrics.coordinator_connected.set(1)

    def known(self) -> Known:
        """Returns an empty `Known`, because the primary reports this information."""
        return Known()

    def disconnected(self) -> None:
        """Records that the session has broken. This server continues to follow its primary."""
        self._metrics.coordinator_connected.set(0)

    def members(
        self, generation: int, member_ids: tuple[str, ...], key_digests: Mapping[str, str]
    ) -> None:
        """Does nothing; the members are in the primary's journal."""

    def placed(self, place: Place) -> None:
        """Records the assigned place, and wakes the tasks that are waiting for it."""
        self._place = place
        self._moved.set()
        self._moved = asyncio.Event()

    def settled(self, move: int, epoch: int) -> None:
        """Does nothing; moves are in the primary's journal."""

    def ordered(self, order: MoveOrder) -> None:
        """Does nothing; a backup does not give partitions away."""

    def stored_bytes(self) -> int:
        """Returns the number of stored bytes, for the heartbeat."""
        return 0 if self._copy is None else self._copy.stored_bytes

    # ------------------------------------------------------------------------------------ following

    async def _follow(self) -> None:
        """Follows primaries until the coordinator promotes this server."""
        backoff = Backoff(first_s=_FIRST_BACKOFF_S, longest_s=_LONGEST_BACKOFF_S)
        while self._place is None or self._place.follows:
            place = self._place
            if place is None or not place.primary_address:
                await self._wait_for_change()
                continue
            if (left_s := self._not_before - asyncio.get_running_loop().time()) > 0:
                await self._wait_for_change(timeout_s=left_s)
                continue
            following = asyncio.create_task(self._follow_primary(place, backoff))
            try:
                while not following.done() and self._is_still(place):
                    await self._wait_for_change(following)
            finally:
                await end_tasks([following])
            if self._is_still(place):
                again_in_s = self._again_in_s(following.exception(), backoff)
                await self._wait_for_change(timeout_s=again_in_s)

    async def _wait_for_change(
        self, *others: asyncio.Task[None], timeout_s: float | None = None
    ) -> None:
        """Waits until the coordinator sends a message about the place, one of the tasks `others`
        ends, or `timeout_s` has passed."""
        changed = asyncio.create_task(self._moved.wait())
        try:
            await asyncio.wait(
                [changed, *others], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            await end_tasks([changed])

    def _is_still(self, place: Place) -> bool:
        """Returns whether the assigned place is still the same as `place`. Messages repeated after
        a broken session, and changes to `in_sync`, do not count as changes."""
        now = self._place
        return now is not None and (now.follows, now.epoch, now.primary_address) == (
            True,
            place.epoch,
            place.primary_address,
        )

    def _again_in_s(self, error: BaseException | None, backoff: Backoff) -> float:
        if not isinstance(error, ShoalError) or isinstance(error, InternalError):
            raise error or AssertionError("a stream ends with an error")
        again_in_s = backoff.next_s()
        if error.reason == _DIVERGED:
            again_in_s = _DIVERGED_AGAIN_S
            self._not_before = asyncio.get_running_loop().time() + again_in_s
        logger.warning(
            "stopped following the primary; will retry",
            extra={"reason": error.reason, "error": error, "again_in_s": round(again_in_s, 3)},
        )
        return again_in_s

    async def _follow_primary(self, place: Place, backoff: Backoff) -> None:
        """Follows the primary on one stream. Raises the error that closed the stream."""
        await self._kept()
        settings = self._settings.channel(place.primary_address)
        channel = aio_channel(settings)
        begin = pb.FollowBegin(
            job_id=self._settings.job,
            server_id=self._settings.server_id,
            epoch=place.epoch,
            format=FORMAT_VERSION,
        )
        stream = _Stream(begin)
        try:
            call = channel.stream_stream(
                _FOLLOW, request_serializer=pb.FollowRequest.SerializeToString
            )(stream.requests())
            stream.cancel = call.cancel
            async for item in received_items(call):
                self._take(item, stream)
                if item.kind == WHOLE:
                    backoff.reset()
            raise stream.failure or UnavailableError(
                "the primary ended the stream", reason="SESSION_ENDED"
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL:
                # grpc reports this status instead of the actual one when the connection breaks
                # during a send.
                raise stream.failure or UnavailableError(
                    "the stream broke", reason="SESSION_BROKEN"
                ) from error
            raise stream.failure or from_rpc_error(
                error, call=f"Follow at {place.primary_address}"
            ) from error
        except asyncio.CancelledError:
            if stream.failure is not None:
                raise stream.failure from None
            raise
        finally:
            stream.end()
            await channel.close()

    def _take(self, item: Item, stream: _Stream) -> None:
        if stream.failure is not None:
            raise stream.failure
        try:
            if item.kind == STATE:
                stream.state = state_from_json(json.loads(bytes(item.payload)))
            elif item.kind == PARTITION and stream.state is not None:
                configuration, spec = (
                    stream.state.configuration,
                    stream.state.layout.partitions[item.fields["partition_id"]],
                )
                optimizer = None if configuration is None else configuration.optimizer
                stream.images.append(
                    partition_from_bytes(item.fields, item.payload, spec, optimizer)
                )
            elif item.kind == WHOLE and stream.state is not None and not stream.is_complete:
                stream.batches = tuple(
                    (int(first), int(end)) for first, end in item.fields["batches"]
                )
            elif item.kind == RECORD:
                stream.records.append((item.record(), item.position))
                stream.nbytes += item.payload.nbytes
            else:
                raise ValueError(f"unexpected item of kind {item.kind}")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CorruptDataError(
                f"invalid stream from the primary: {type(error).__name__}: {error}",
                reason="STREAM_MALFORMED",
            ) from error
        if stream.copy is not None:
            stream.make_records()
        elif item.kind == WHOLE:
            self._keeping = asyncio.create_task(self._keep(stream))
        elif stream.nbytes > _MOST_WAITING_BYTES:
            raise UnavailableError(
                f"{stream.nbytes} bytes of changes are waiting for this server's disk",
                reason="BACKUP_BEHIND",
            )

    async def _kept(self) -> None:
        if self._keeping is not None:
            await asyncio.wait([self._keeping])

    async def _keep(self, stream: _Stream) -> None:
        """Replaces this server's state with the primary's complete state, while more changes
        arrive."""
        assert stream.state is not None, "it came first"
        job_id, server_id = self._settings.job, self._settings.server_id
        # If this server is restarted, it must not serve before the coordinator has assigned it a
        # role. The backup's record in the journal ensures that.
        own = replace(
            stream.state,
            batches=stream.batches or (),
            job_id=job_id,
            server_id=server_id,
            backup=server_id,
            journal=_FIRST_FILE,
        )
        image = ServerImage(state=own, partitions=tuple(stream.images))
        try:
            if self._copy is not None:
                before, self._copy = self._copy, None
                await before.close()
            self._directory.clear(job_id=job_id, server_id=server_id)
            failpoint("backup.cleared")
            copy = _Copy(self._settings, self._directory, self._metrics)
            try:
                await copy.begin(image)
            except BaseException:
                await copy.close()
                raise
        except OSError as error:
            stream.fail(
                UnavailableError(
                    f"data_dir={self._directory.path}: {error}; free some space on its disk",
                    reason="JOURNAL_FAILED",
                )
            )
        except ShoalError as error:
            stream.fail(error)
        except Exception as error:
            # without this, the error would go unnoticed and the primary would wait for a
            # confirmation forever
            stream.fail(
                InternalError(
                    f"could not store the primary's state: {type(error).__name__}: {error}"
                )
            )
            raise
        else:
            failpoint("backup.copied")
            self._copy = stream.copy = copy
            stream.images.clear()
            stream.kept(0, whole=True)
            stream.make_records()
            logger.info(
                "received the primary's complete state", extra={"partitions": len(image.partitions)}
            )


class _Stream:
    """One stream from the primary, and the data received on it."""

    def __init__(self, begin: pb.FollowBegin) -> None:
        self._begin = begin
        self._changed = asyncio.Event()
        self._ended = False
        self._whole = False
        self.position = 0
        """Position of the last record that was both journaled and applied."""
        self.state: ServerState | None = None
        self.images: list[PartitionImage] = []
        self.batches: tuple[tuple[int, int], ...] | None = None
        """Ranges of finished batches; None until all state of the primary has arrived."""
        self.records: list[tuple[Record, int]] = []
        """Changes that have not been passed to the journal yet, as pairs of record and position."""
        self.nbytes = 0
        """Bytes of the payloads in `records`."""
        self.copy: _Copy | None = None
        self.failure: ShoalError | None = None
        self.cancel: Callable[[], object] = lambda: None
        """Function that cancels the call."""

    @property
    def is_complete(self) -> bool:
        """True if the complete state of the primary has arrived."""
        return self.batches is not None

    def make_records(self) -> None:
        """Writes the changes received so far to the journal of the copy (`_Copy`), and applies
        them."""
        assert self.copy is not None
        records, self.records, self.nbytes = self.records, [], 0
        for record, position in records:
            self.copy.make(record, position, self)

    def kept(self, position: int, *, whole: bool = False) -> None:
        """Confirms to the primary that all records up to `position` are on this server's disk.
        `whole`: True if the complete state is on disk too."""
        self.position = max(self.position, position)
        self._whole |= whole
        self._changed.set()

    def fail(self, error: ShoalError) -> None:
        """Closes the stream with an error, because its data can no longer be stored."""
        self.failure = self.failure or error
        self.cancel()

    def end(self) -> None:
        """Stops sending messages to the primary."""
        self._ended = True
        self._changed.set()

    async def requests(self) -> AsyncGenerator[pb.FollowRequest]:
        """Yields the messages to the primary. A confirmed position includes all earlier positions,
        so only the newest is sent."""
        yield pb.FollowRequest(begin=self._begin)
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._ended:
                return
            yield pb.FollowRequest(kept=pb.FollowKept(position=self.position, whole=self._whole))


class _Copy:
    """A backup's copy of its primary: the primary's state, and a journal of each change since."""

    def __init__(
        self, settings: PsServerSettings, directory: DataDirectory, metrics: Metrics
    ) -> None:
        """Starts the copy's journal. Raises OSError."""
        self._settings = settings
        self._directory = directory
        self._metrics = metrics
        self._failure: BaseException | None = None
        self._journal = Journal(
            directory.segments,
            number=_FIRST_FILE,
            previous_end=0,
            fsync=settings.fsync,
            failed=self._not_made,
            written=metrics.journal_written,
            unwritten=metrics.journal_failures.inc,
        )
        self._replay = Replay(None)
        self._snapshots: SnapshotKeeper | None = None
        self._periodic: asyncio.Task[None] | None = None

    async def begin(self, image: ServerImage) -> None:
        """Writes `image` to disk, and takes over its tensors as this server's own. Raises
        UnavailableError / SNAPSHOT_FAILED."""
        loop = asyncio.get_running_loop()
        try:
            await asyncio.shield(
                loop.run_in_executor(None, write_snapshot, self._directory.snapshot, image)
            )
        except OSError as error:
            raise UnavailableError(
                f"could not write the primary's state to {self._directory.path}: {error}; free "
                "some space on its disk",
                reason="SNAPSHOT_FAILED",
            ) from error
        self._replay = replay = Replay(image)
        changes = Changes(
            shard=replay.shard, layout=lambda: replay.layout, members=lambda: replay.members
        )
        changes.write_to(self._journal)

        def state() -> ServerState:
            assert replay.layout is not None, "a primary without partitions is not followed"
            return replace(
                image.state,
                layout=replay.layout,
                configuration=replay.configuration,
                membership=replay.members,
                settled=replay.moves.settled,
                leaving=replay.moves.leaving,
            )

        self._snapshots = SnapshotKeeper(
            directory=self._directory,
            shard=replay.shard,
            moves=replay.moves,
            state=state,
            changes=changes,
            metrics=self._metrics,
            journal_limit=self._settings.journal_limit,
        )
        self._periodic = asyncio.create_task(
            self._snapshots.periodically(self._settings.snapshot_interval)
        )

    def make(self, record: Record, position: int, stream: _Stream) -> None:
        """Writes a change to the journal and applies it, in order; then confirms it to the
        primary."""
        if stream.failure is not None:
            return  # an earlier change is missing

        def effect() -> None:
            try:
                self._replay.make(record)
            except Exception as error:
                what = (
                    f"could not apply a change from the primary: {type(error).__name__}: {error}; "
                    "copying everything again"
                )
                logger.exception(
                    "could not apply a change from the primary",
                    extra={"kind": record.kind, "fields": dict(record.fields)},
                )
                stream.fail(UnavailableError(what, reason=_DIVERGED))
                raise
            failpoint("backup.record_made")
            stream.kept(position)

        def refused() -> None:
            stream.fail(
                UnavailableError(
                    f"data_dir={self._directory.path}: could not write the journal",
                    reason="JOURNAL_FAILED",
                )
            )

        self._journal.append(record, effect, refused=refused)

    @property
    def stored_bytes(self) -> int:
        """Bytes of values and optimizer state."""
        return self._replay.shard.summary().stored_bytes

    async def taken_over(self) -> Recovered:
        """Closes the journal and returns the copied state, with which this server continues as a
        primary. Raises InternalError if a change could not be applied."""
        await self.close()
        if self._failure is not None:
            raise InternalError(
                f"could not apply a change from the primary: {self._failure}"
            ) from self._failure
        number, end = self._journal.end
        return self._replay.recovered(next_file=number + 1, last_end=end)

    async def close(self) -> None:
        """Waits for pending writes and closes the journal."""
        if self._periodic is not None:
            await end_tasks([self._periodic])
        if self._snapshots is not None:
            await self._snapshots.idle()
        await self._journal.close()

    def _not_made(self, error: BaseException) -> None:
        self._failure = error
