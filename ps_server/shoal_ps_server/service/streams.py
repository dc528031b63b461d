"""Taking an upload stream apart: chunks as they come off the wire, back into whole partitions. Nothing is applied here.

A stream is refused at the first thing that is wrong with it; partitions that were complete before have been handed on already. Memory is
bounded before a byte is kept: by what a header may declare, by what it did declare, and by the number of chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from shoal_common.errors import DeadlineError, InvalidRequestError, LimitError
from shoal_common.wire import LARGEST_CHUNK_BYTES, decode_push_chunk
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.shard.payload import Upload, UploadHeader, describe

IDLE_LIMIT: Final = timedelta(seconds=60)
"""How long a client may leave an open stream silent."""
MOST_CHUNKS: Final = 4096
"""Chunks of one partition. A chunk costs a few hundred bytes beyond its payload, so tiny ones would not be bounded by their payload."""

Chunk = tuple[pb.PushHeader | None, memoryview]


async def received_partitions(
    messages: AsyncIterator[bytes],
    open_upload: Callable[[pb.PushHeader], Awaitable[UploadHeader]],
    *,
    idle_limit: timedelta = IDLE_LIMIT,
) -> AsyncGenerator[Upload]:
    """The partitions of a stream, one by one. `open_upload` checks a header, before its payload is kept.

    Raises what `open_upload` does, InvalidRequestError (MESSAGE_MALFORMED, STREAM_MALFORMED, PAYLOAD_TRUNCATED, PAYLOAD_SIZE_MISMATCH),
    LimitError (PAYLOAD_TOO_LARGE, CHUNKS_TOO_SMALL) and DeadlineError / STREAM_IDLE.
    """
    chunk = await _next_chunk(messages, idle_limit)
    while chunk is not None:
        header, payload = chunk
        if header is None:
            raise InvalidRequestError("a chunk without a header where a partition must begin", reason="STREAM_MALFORMED")
        opened = await open_upload(header)
        expected = opened.spec.nbytes
        received = 0
        pieces: list[memoryview] = []
        while True:
            received += payload.nbytes
            if received > expected:
                raise InvalidRequestError(
                    f"{describe(opened.spec)}: {received} bytes came, its header declares {expected}", reason="PAYLOAD_SIZE_MISMATCH"
                )
            pieces.append(payload)
            if received == expected:
                break
            if len(pieces) == MOST_CHUNKS:
                raise LimitError(
                    f"{describe(opened.spec)}: {received} of {expected} bytes in {MOST_CHUNKS} chunks; send about 1 MiB in each",
                    reason="CHUNKS_TOO_SMALL",
                )
            chunk = await _next_chunk(messages, idle_limit)
            if chunk is None or chunk[0] is not None:
                what = "the stream ended" if chunk is None else "the next partition began"
                raise InvalidRequestError(
                    f"{describe(opened.spec)}: {what} after {received} of {expected} bytes; nothing of it was applied",
                    reason="PAYLOAD_TRUNCATED",
                )
            payload = chunk[1]
        yield Upload(header=opened, pieces=pieces)
        chunk = await _next_chunk(messages, idle_limit)


async def _next_chunk(messages: AsyncIterator[bytes], idle_limit: timedelta) -> Chunk | None:
    async with _limited(idle_limit):
        data = await anext(messages, None)
    if data is None:
        return None
    chunk = decode_push_chunk(data)
    if chunk[1].nbytes > LARGEST_CHUNK_BYTES:
        raise LimitError(
            f"a chunk of {chunk[1].nbytes} bytes: expected at most {LARGEST_CHUNK_BYTES}, best about 1 MiB", reason="PAYLOAD_TOO_LARGE"
        )
    return chunk


@asynccontextmanager
async def _limited(idle_limit: timedelta) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(idle_limit.total_seconds()):
            yield
    except TimeoutError as error:
        raise DeadlineError(
            f"nothing came in this stream for {idle_limit.total_seconds():g} s, and it was not ended", reason="STREAM_IDLE"
        ) from error
