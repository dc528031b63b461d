"""Implements ReadRows and RestoreRows, which copy a complete bucket of a sparse table to or from a
checkpoint. Belongs to the event loop.

A bucket has at most 256 MiB. All buckets being copied, in either direction, share a memory limit,
so that a complete table is never in memory twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Final

from shoal_common.errors import CorruptDataError, DeadlineError, InvalidRequestError, LimitError
from shoal_common.formats.wire import (
    CHUNK_BYTES,
    LARGEST_CHUNK_BYTES,
    checksum,
    decode_rows_chunk,
    encode_rows_chunk,
)
from shoal_common.tables.file import BucketImage, read_bucket
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.consistency.membership import Membership
from shoal_ps_server.service.requests import at_least, check_job, parse_member, partition_of
from shoal_ps_server.service.staging import Staging
from shoal_ps_server.shard.layout import Bucket, Layout, PartitionSpec
from shoal_ps_server.shard.payload import describe
from shoal_ps_server.shard.shard import Outcome, Restoration, Shard
from shoal_ps_server.shard.table_rows import LARGEST_BUCKET_BYTES
from shoal_ps_server.storage.changes import Changes

_MEMORY_BYTES: Final = 2 * LARGEST_BUCKET_BYTES
_IDLE_LIMIT: Final = timedelta(seconds=60)
"""Maximum silence of a client in an open stream."""


class WholeBuckets:
    """Copies buckets to and from one server."""

    def __init__(
        self,
        *,
        job_id: str,
        shard: Shard,
        changes: Changes,
        membership: Membership,
        layout_of_epoch: Callable[[int], Awaitable[Layout]],
        idle_limit: timedelta = _IDLE_LIMIT,
    ) -> None:
        self._job_id = job_id
        self._shard = shard
        self._changes = changes
        self._membership = membership
        self._layout_of_epoch = layout_of_epoch
        self._idle_limit = idle_limit
        self._memory = Staging(nbytes=_MEMORY_BYTES)

    async def read(self, request: pb.ReadRowsRequest) -> AsyncGenerator[bytes]:
        """Yields the encoded chunks of a bucket. Raises the errors documented for ReadRows in the
        .proto."""
        check_job(request.job_id, self._job_id)
        spec, bucket = _bucket(
            request.partition_id, await self._layout_of_epoch(request.shard_map_epoch)
        )
        self._shard.check_open(spec)
        release = await self._memory.take(
            f"reading {spec.partition_id}", self._shard.bucket_bytes(spec)
        )
        try:
            image = self._shard.bucket_image(spec)
            assert image.rows is not None, "it is of a bucket"
            whole = BucketImage(
                table=bucket.table,
                number=bucket.number,
                buckets=bucket.spec.buckets,
                version=image.version,
                rows=image.rows,
            )
            data = whole.encoded()
            header = pb.RowsHeader(
                partition_id=spec.partition_id,
                payload_bytes=data.nbytes,
                checksum=data.checksum(),
                version=image.version,
            )
            yield encode_rows_chunk((header, memoryview(b"")))
            for piece in data.chunks(CHUNK_BYTES):
                yield encode_rows_chunk((None, piece))
        finally:
            release()

    async def restore(
        self, messages: AsyncIterator[bytes], *, key: str = ""
    ) -> pb.RestoreRowsResponse:
        """Serves one RestoreRows stream to its end. `key`: key presented by the caller. Raises the
        errors documented for RestoreRows in the .proto."""
        idle_s = self._idle_limit.total_seconds()
        release: Callable[[], None] = _nothing
        try:
            async with asyncio.timeout(idle_s) as idle:
                header = await _opening(messages)
                check_job(header.job_id, self._job_id)
                spec, bucket = _bucket(
                    header.partition_id, await self._layout_of_epoch(header.shard_map_epoch)
                )
                _check_size(spec, header)
                number = at_least("restoration", header.restoration, 0)
                member_id, generation = (
                    parse_member(header.member_id),
                    at_least("generation", header.generation, 0),
                )
                self._shard.check_open(spec)
                await self._membership.admit(member_id, generation, key=key)
                # twice, for the payload and for the rows decoded from it
                release = await self._memory.take(member_id, 2 * header.payload_bytes)
                payload = await _received(
                    spec,
                    header,
                    messages,
                    lambda: idle.reschedule(asyncio.get_running_loop().time() + idle_s),
                )
            restoration = await self._prepared(spec, bucket, number, payload)
            self._membership.check(member_id, generation)
            outcome = await self._made(restoration)
        except TimeoutError as error:
            if not idle.expired():
                raise
            raise DeadlineError(
                f"received no part of a bucket in this stream for {idle_s:g} s",
                reason="STREAM_IDLE",
            ) from error
        finally:
            release()
        return pb.RestoreRowsResponse(version=outcome.version, duplicate=outcome.duplicate)

    async def _prepared(
        self, spec: PartitionSpec, bucket: Bucket, number: int, payload: memoryview
    ) -> Restoration:
        def prepare() -> Restoration:
            try:
                image = read_bucket(payload)
            except ValueError as error:
                raise InvalidRequestError(
                    f"{describe(spec)}: cannot parse the payload as a bucket: {error}",
                    reason="ROWS_INVALID",
                ) from error
            found = (image.table, image.number, image.buckets)
            if found != (bucket.table, bucket.number, bucket.spec.buckets):
                raise InvalidRequestError(
                    f"{describe(spec)}: the payload is bucket {image.number} of {image.buckets} "
                    f"of table {image.table!r}; expected bucket {bucket.number} of "
                    f"{bucket.spec.buckets} of {bucket.table!r}",
                    reason="ROWS_INVALID",
                )
            rows = self._shard.prepared(spec, image.rows)
            return Restoration(
                spec=spec, number=number, version=image.version, rows=rows, payload=payload
            )

        return await asyncio.to_thread(prepare)

    async def _made(self, restoration: Restoration) -> Outcome:
        made = await self._changes.in_time(lambda: self._changes.restore(restoration))
        return await self._changes.in_time(lambda: asyncio.shield(made))


async def _opening(messages: AsyncIterator[bytes]) -> pb.RowsHeader:
    async for data in messages:
        header, payload = decode_rows_chunk(data, InvalidRequestError)
        if header is None or payload.nbytes:
            break
        return header
    raise InvalidRequestError(
        "the first chunk of a bucket is invalid; expected its header without payload",
        reason="STREAM_MALFORMED",
    )


async def _received(
    spec: PartitionSpec,
    header: pb.RowsHeader,
    messages: AsyncIterator[bytes],
    came: Callable[[], None],
) -> memoryview:
    """Receives the payload of a bucket, and returns it once it is complete."""
    payload, at = memoryview(bytearray(header.payload_bytes)), 0
    async for data in messages:
        opening, piece = decode_rows_chunk(data, InvalidRequestError)
        if opening is not None:
            raise InvalidRequestError(
                f"{describe(spec)}: received a second header; send one bucket per stream",
                reason="STREAM_MALFORMED",
            )
        if piece.nbytes > LARGEST_CHUNK_BYTES:
            raise LimitError(
                f"a chunk has {piece.nbytes} bytes; expected at most {LARGEST_CHUNK_BYTES}, "
                "ideally about 1 MiB",
                reason="PAYLOAD_TOO_LARGE",
            )
        if at + piece.nbytes > payload.nbytes:
            raise InvalidRequestError(
                f"{describe(spec)}: received {at + piece.nbytes} bytes, but the header declares "
                f"{payload.nbytes}",
                reason="PAYLOAD_SIZE_MISMATCH",
            )
        payload[at : at + piece.nbytes] = piece
        at += piece.nbytes
        came()
    if at < payload.nbytes:
        raise InvalidRequestError(
            f"{describe(spec)}: the stream ended after {at} of {payload.nbytes} bytes; nothing was "
            "changed",
            reason="PAYLOAD_TRUNCATED",
        )
    if (found := checksum(payload)) != header.checksum:
        raise CorruptDataError(
            f"{describe(spec)}: the payload's xxh3-64 is {found:#018x}, but its header declares "
            f"{header.checksum:#018x}; nothing was changed",
            reason="CHECKSUM_MISMATCH",
        )
    return payload


def _bucket(partition_id: int, layout: Layout) -> tuple[PartitionSpec, Bucket]:
    spec = partition_of(partition_id, layout)
    if spec.bucket is None:
        raise InvalidRequestError(
            f"{describe(spec)}: the partition is not a bucket of a sparse table, so it has no rows",
            reason="ROWS_INVALID",
        )
    return spec, spec.bucket


def _check_size(spec: PartitionSpec, header: pb.RowsHeader) -> None:
    if not 0 <= header.payload_bytes <= 2 * LARGEST_BUCKET_BYTES:
        raise LimitError(
            f"{describe(spec)}: payload_bytes={header.payload_bytes}: a bucket may have at most "
            f"{LARGEST_BUCKET_BYTES} bytes",
            reason="PAYLOAD_TOO_LARGE",
        )


def _nothing() -> None:
    return None
