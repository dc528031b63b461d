"""Assembles the chunks of upload streams into complete partitions, without applying them.

A stream is refused at its first error. Partitions that were complete before the error have already
been passed on to the caller.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from shoal_common.errors import InvalidRequestError, LimitError
from shoal_common.formats.wire import LARGEST_CHUNK_BYTES, decode_push_chunk
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.shard.payload import Upload, describe


class Chunk(Protocol):
    """Part of a partition's payload, either in memory or still in a socket."""

    @property
    def nbytes(self) -> int:
        """Number of bytes in the chunk."""

    async def move_to(self, upload: Upload) -> None:
        """Appends the bytes to the upload. Raises the errors of `Upload.room`."""


@dataclass(frozen=True)
class Arrived:
    """Chunk of a payload that is already in memory."""

    payload: memoryview

    @property
    def nbytes(self) -> int:
        """Number of bytes in the chunk."""
        return self.payload.nbytes

    async def move_to(self, upload: Upload) -> None:
        """Copies the bytes to the upload. Raises the errors of `Upload.add`."""
        upload.add(self.payload)


Part = tuple[pb.PushHeader | None, Chunk]
"""Element of a stream. An element with a header starts a partition; an element without a header
continues it."""


async def parts_of(messages: AsyncIterator[bytes]) -> AsyncGenerator[Part]:
    """Decodes PushChunks, and yields them as parts. Raises InvalidRequestError / MESSAGE_MALFORMED
    and LimitError / PAYLOAD_TOO_LARGE."""
    async for data in messages:
        header, payload = decode_push_chunk(data)
        if payload.nbytes > LARGEST_CHUNK_BYTES:
            raise LimitError(
                f"a chunk has {payload.nbytes} bytes; expected at most {LARGEST_CHUNK_BYTES}, "
                "ideally about 1 MiB",
                reason="PAYLOAD_TOO_LARGE",
            )
        yield header, Arrived(payload)


async def received_partitions(
    parts: AsyncIterator[Part], open_upload: Callable[[pb.PushHeader], Awaitable[Upload]]
) -> AsyncGenerator[Upload]:
    """Yields each partition of a stream when it is complete. `open_upload`: checks a header before
    the payload is stored, and returns the upload.

    Raises the errors of `parts` and `open_upload`, and InvalidRequestError: STREAM_MALFORMED,
    PAYLOAD_TRUNCATED, PAYLOAD_SIZE_MISMATCH.
    """
    upload: Upload | None = None
    async for header, chunk in parts:
        if header is not None:
            if upload is not None:
                raise _truncated(upload, "the next partition began")
            upload = await open_upload(header)
        elif upload is None:
            raise InvalidRequestError(
                "the first chunk of a partition has no header", reason="STREAM_MALFORMED"
            )
        elif not chunk.nbytes:
            raise InvalidRequestError(
                f"{describe(upload.header.spec)}: received an empty chunk before the end of the "
                "payload",
                reason="STREAM_MALFORMED",
            )
        await chunk.move_to(upload)
        if not upload.missing:
            yield upload
            upload = None
    if upload is not None:
        raise _truncated(upload, "the stream ended")


def _truncated(upload: Upload, what: str) -> InvalidRequestError:
    spec = upload.header.spec
    return InvalidRequestError(
        f"{describe(spec)}: {what} after {upload.received} of {upload.header.payload_bytes} "
        "bytes; the partition is unchanged",
        reason="PAYLOAD_TRUNCATED",
    )
