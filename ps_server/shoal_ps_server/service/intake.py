"""Implements Initialize and Push: converts the chunks of an upload stream to changes to the shard,
and collects the results.

Belongs to the event loop. While a partition is written to the journal and applied, gRPC's own
threads or the kernel already receive the next chunks. Flow control limits senders to the server's
speed. `staging.py` provides memory for data that is not applied yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from datetime import timedelta
from typing import Final

from shoal_common.errors import DeadlineError, InvalidRequestError, ShoalError
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.consistency.clocks import ConsistencyMode
from shoal_ps_server.consistency.membership import Membership
from shoal_ps_server.service.requests import UploadKind, check_job, parse_upload_header
from shoal_ps_server.service.staging import Staging
from shoal_ps_server.service.streams import Part, received_partitions
from shoal_ps_server.shard.layout import Layout
from shoal_ps_server.shard.payload import Upload, UploadHeader
from shoal_ps_server.shard.shard import Outcome
from shoal_ps_server.storage.changes import Changes

IDLE_LIMIT: Final = timedelta(seconds=60)
"""Maximum time in an open stream until the next partition is complete."""


class Intake:
    """Receives all upload streams of one server."""

    def __init__(
        self,
        *,
        job_id: str,
        changes: Changes,
        membership: Membership,
        layout_of_epoch: Callable[[int], Awaitable[Layout]],
        applied: Callable[[UploadKind, Upload, Outcome], None],
        waited: Callable[[float], None],
        idle_limit: timedelta = IDLE_LIMIT,
        staging: Staging | None = None,
    ) -> None:
        """`applied`: called with the outcome of each partition. `waited`: called with the duration
        in seconds of each wait for other members, even if it is zero."""
        self._job_id = job_id
        self._changes = changes
        self._membership = membership
        self._layout_of_epoch = layout_of_epoch
        self._applied = applied
        self._waited = waited
        self._idle_limit = idle_limit
        self._staging = staging or Staging()

    async def receive(
        self, parts: AsyncIterator[Part], kind: UploadKind, *, key: str = ""
    ) -> pb.PushResponse:
        """Serves one upload stream to its end. `key`: key presented by the caller. Raises the
        errors documented for Push in the .proto, and DeadlineError / STREAM_IDLE."""
        idle_s = self._idle_limit.total_seconds()
        loop = asyncio.get_running_loop()
        stream = _UploadStream()
        try:
            async with (
                asyncio.timeout(idle_s) as idle,
                aclosing(self._partitions(parts, kind, stream, key)) as partitions,
            ):
                async for upload in partitions:
                    await self._admit(upload, kind, stream)
                    idle.reschedule(loop.time() + idle_s)
        except TimeoutError as error:
            if not idle.expired():
                # a different deadline has expired, e.g. of a request to the coordinator for the
                # shard map
                raise
            raise DeadlineError(
                f"no partition was completed in this stream for {idle_s:g} s", reason="STREAM_IDLE"
            ) from error
        except ShoalError:
            # if an earlier partition is refused too, its error is reported
            await self._changes.in_time(stream.results)
            raise
        finally:
            stream.release()
        results = await self._changes.in_time(stream.results)
        if stream.member_id and kind is UploadKind.PUSH:
            # Only now has the member finished its iteration on this server.
            self._membership.finished(stream.member_id, stream.clock)
        return pb.PushResponse(results=results)

    def _partitions(
        self, parts: AsyncIterator[Part], kind: UploadKind, stream: _UploadStream, key: str
    ) -> AsyncGenerator[Upload]:
        async def open_upload(header: pb.PushHeader) -> Upload:
            check_job(header.job_id, self._job_id)
            opened = parse_upload_header(
                header, await self._layout_of_epoch(header.shard_map_epoch), kind
            )
            self._changes.check_open(opened.spec)
            stream.check_member(opened)
            await self._membership.admit(opened.member_id, opened.generation, key=key)
            if kind is UploadKind.PUSH and not self._changes.is_settled(opened):
                # The push waits before it occupies memory on this server. Otherwise pushes that
                # wait for other members could use up the memory that these members need for theirs.
                await self._await_turn(opened)
            decoded = (
                0 if opened.codec == pb.CODEC_RAW else opened.length * opened.spec.element.itemsize
            )
            stream.release = await self._staging.take(
                opened.member_id, opened.payload_bytes + decoded
            )
            return Upload(opened)

        return received_partitions(parts, open_upload)

    async def _await_turn(self, push: UploadHeader) -> None:
        """Makes a bsp push wait, if necessary, until all members have read the values that the push
        would change. HTTP/2 flow control makes the sender wait too."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            await self._membership.let_in(
                push.member_id,
                push.generation,
                push.clock,
                check=lambda: self._changes.check_open(push.spec),
            )
        finally:
            if self._membership.consistency.mode is ConsistencyMode.BSP:
                self._waited(loop.time() - started)

    async def _admit(self, upload: Upload, kind: UploadKind, stream: _UploadStream) -> None:
        """Admits a partition that has been received completely, after checking again that its
        sender is still a member. The next partition may be received while this one is written and
        applied."""
        header = upload.header
        self._membership.check(header.member_id, header.generation)
        admit = self._changes.push if kind is UploadKind.PUSH else self._changes.initialize
        outcome = await self._changes.in_time(lambda: admit(upload))
        release, stream.release = stream.release, _nothing

        def over(_: object) -> None:
            release()
            if not outcome.cancelled() and outcome.exception() is None:
                self._applied(kind, upload, outcome.result())

        outcome.add_done_callback(over)
        stream.clock = max(stream.clock, header.clock)
        stream.outcomes.append(outcome)


class _UploadStream:
    """Progress of one upload stream."""

    def __init__(self) -> None:
        self.member_id = ""
        self.clock = 0
        self.outcomes: list[asyncio.Future[Outcome]] = []
        """Outcomes of the admitted partitions, in the order of the stream."""
        self.release: Callable[[], None] = _nothing
        """Releases the memory of the partition being received."""

    def check_member(self, upload: UploadHeader) -> None:
        """Raises InvalidRequestError unless all uploads of the stream belong to one member."""
        if self.member_id and upload.member_id != self.member_id:
            raise InvalidRequestError(
                f"member_id={upload.member_id!r}: expected {self.member_id!r}, since a stream "
                "belongs to one member"
            )
        self.member_id = upload.member_id

    async def results(self) -> list[pb.PartitionResult]:
        """Waits for all admitted partitions and returns their results. If any partition was
        refused, raises the error of the first refused partition."""
        found = []
        for pending in self.outcomes:
            outcome = await asyncio.shield(pending)
            found.append(
                pb.PartitionResult(
                    partition_id=outcome.partition_id,
                    version=outcome.version,
                    staleness=outcome.staleness,
                    duplicate=outcome.duplicate,
                    known_batch=outcome.known_batch,
                )
            )
        return found


def _nothing() -> None:
    return None
