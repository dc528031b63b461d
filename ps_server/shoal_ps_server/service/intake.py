"""Initialize and Push: from a stream of messages to calls on the shard, and the answers back.

Belongs to the event loop. While the shard's thread applies one partition the loop receives the next; a stream runs at most
APPLIES_AHEAD partitions ahead of the shard, and all streams together hold at most STAGING_SLOTS partitions in memory, so a slow shard slows
its senders down instead of filling memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Final

from shoal_common.errors import InvalidRequestError, PreconditionError
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.consistency.membership import Membership
from shoal_ps_server.service.requests import UploadKind, check_job, parse_upload_header
from shoal_ps_server.service.streams import received_partitions
from shoal_ps_server.shard.layout import Layout
from shoal_ps_server.shard.payload import Upload, UploadHeader
from shoal_ps_server.shard.shard import Outcome, Shard
from shoal_ps_server.shard.worker import ShardWorker

APPLIES_AHEAD: Final = 2
STAGING_SLOTS: Final = 64
"""At most 16 MiB each."""


class Intake:
    """What all upload streams of a server share."""

    def __init__(
        self,
        *,
        job_id: str,
        shard: ShardWorker,
        membership: Membership,
        layout_of_epoch: Callable[[int], Awaitable[Layout]],
        applied: Callable[[UploadKind, Upload, Outcome], None],
    ) -> None:
        """`applied` is told of every outcome, on the event loop, also when the stream has broken meanwhile."""
        self.job_id = job_id
        self.shard = shard
        self.membership = membership
        self.layout_of_epoch = layout_of_epoch
        self.applied = applied
        self.slots = asyncio.Semaphore(STAGING_SLOTS)

    async def receive(self, messages: AsyncIterator[bytes], kind: UploadKind) -> pb.PushResponse:
        """Serves one stream to its end. Raises what the .proto says of Push."""
        stream = _UploadStream(self, kind)
        try:
            async with aclosing(received_partitions(messages, stream.open)) as partitions:
                async for upload in partitions:
                    await stream.hand_over(upload)
            return await stream.finish()
        finally:
            stream.abandon()


class _UploadStream:
    """One stream's progress."""

    def __init__(self, intake: Intake, kind: UploadKind) -> None:
        self._intake = intake
        self._kind = kind
        self._first: UploadHeader | None = None
        self._clock = 0
        self._holds_slot = False
        """For the partition that is being received."""
        self._refused = False
        """Written and read on the shard's thread only: nothing after a refused partition is applied."""
        self._pending: deque[asyncio.Future[Outcome]] = deque()
        self._results: list[pb.PartitionResult] = []

    async def open(self, header: pb.PushHeader) -> UploadHeader:
        """Checks a header, and makes room for its payload."""
        intake = self._intake
        check_job(header.job_id, intake.job_id)
        upload = parse_upload_header(header, await intake.layout_of_epoch(header.shard_map_epoch), self._kind)
        if self._first is None:
            self._first = upload
        elif upload.member_id != self._first.member_id:
            raise InvalidRequestError(
                f"member_id={upload.member_id!r} in a stream that began with {self._first.member_id!r}: one stream, one member"
            )
        await intake.membership.admit(upload.member_id, upload.generation)
        await intake.slots.acquire()
        self._holds_slot = True
        return upload

    async def hand_over(self, upload: Upload) -> None:
        """A partition has come whole: gives it to the shard; waits for earlier ones when too many are under way."""
        # It may have taken long to come.
        self._intake.membership.check(upload.header.member_id, upload.header.generation)
        self._clock = max(self._clock, upload.header.clock)
        future = self._intake.shard.submit(lambda shard: self._apply(shard, upload))
        self._holds_slot = False
        future.add_done_callback(lambda done: self._applied(upload, done))
        self._pending.append(future)
        if len(self._pending) > APPLIES_AHEAD:
            await self._settle_oldest()

    async def finish(self) -> pb.PushResponse:
        """The stream has ended well: waits for the rest. Only now has the member finished its iteration here."""
        while self._pending:
            await self._settle_oldest()
        if self._first is not None and self._kind is UploadKind.PUSH:
            self._intake.membership.finished(self._first.member_id, self._clock)
        return pb.PushResponse(results=self._results)

    def abandon(self) -> None:
        """Gives back what is held. What the shard is at work on it still finishes."""
        if self._holds_slot:
            self._intake.slots.release()

    async def _settle_oldest(self) -> None:
        outcome = await self._pending.popleft()
        self._results.append(
            pb.PartitionResult(
                partition_id=outcome.partition_id, version=outcome.version, staleness=outcome.staleness, duplicate=outcome.duplicate
            )
        )

    def _apply(self, shard: Shard, upload: Upload) -> Outcome:
        """On the shard's thread."""
        if self._refused:
            raise PreconditionError("a partition before this one was refused", reason="STREAM_REFUSED")
        try:
            return shard.push(upload) if self._kind is UploadKind.PUSH else shard.initialize(upload)
        except BaseException:
            self._refused = True
            raise

    def _applied(self, upload: Upload, done: asyncio.Future[Outcome]) -> None:
        self._intake.slots.release()
        if not done.cancelled() and done.exception() is None:
            self._intake.applied(self._kind, upload, done.result())
