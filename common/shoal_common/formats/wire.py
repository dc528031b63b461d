"""Tensors on the wire: PushChunk and PullChunk in protobuf's encoding, but without the copies that
protobuf makes of their payload.

A generated class copies a `bytes` field when it is set, serialized, parsed and read. Here protobuf
handles only the header, and the payload stays a memoryview: encoding copies it once (gRPC sends
only `bytes`), decoding never. The format is compatible with the generated classes: encodings that
are valid but unusual (unknown fields, a different order) are left to protobuf itself.

The functions are serializers and deserializers for gRPC: they convert `(header or None, payload)`
to `bytes` and back. The module needs only numpy; bfloat16, which numpy lacks, is represented as
uint16. This module does not check headers against payloads; receivers do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import xxhash
from google.protobuf.message import DecodeError
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_common.errors import CorruptDataError, InvalidRequestError, ShoalError

CHUNK_BYTES: Final = 1 << 20
"""Size of one chunk's payload. Streams are fastest between 256 KiB and 4 MiB."""

LARGEST_CHUNK_BYTES: Final = 4 << 20
"""Maximum size of a PushChunk's payload."""

LARGEST_PAYLOAD_BYTES: Final = 16 << 20
"""Maximum size of the payload of one partition, in a push or a pull."""

HeaderT = TypeVar("HeaderT", pb.PushHeader, pb.PullHeader, pb.FollowHeader, pb.RowsHeader)


# ------------------------------------------------------------------------------------------- dtypes


@dataclass(frozen=True)
class DtypeInfo:
    """An element type's protocol number, name and numpy dtype."""

    dtype: int
    """Value of shoal.v1.Dtype."""

    name: str
    """Name in TensorSpec.dtype."""

    numpy: np.dtype[Any]
    """numpy dtype, little-endian; uint16 for bfloat16."""

    @property
    def item_bytes(self) -> int:
        return self.numpy.itemsize


DTYPES: Final[Mapping[int, DtypeInfo]] = {
    info.dtype: info
    for info in (
        DtypeInfo(pb.DTYPE_FLOAT32, "float32", np.dtype("<f4")),
        DtypeInfo(pb.DTYPE_FLOAT64, "float64", np.dtype("<f8")),
        DtypeInfo(pb.DTYPE_FLOAT16, "float16", np.dtype("<f2")),
        DtypeInfo(pb.DTYPE_BFLOAT16, "bfloat16", np.dtype("<u2")),
    )
}
"""Properties of all Dtypes except UNSPECIFIED."""

_BY_NAME: Final = {info.name: info for info in DTYPES.values()}


def dtype_info(dtype: int | str) -> DtypeInfo:
    """Returns the properties of a shoal.v1.Dtype, given its number or its name ("bfloat16"). Raises
    InvalidRequestError / DTYPE_UNSUPPORTED for an unknown type."""
    info = _BY_NAME.get(dtype) if isinstance(dtype, str) else DTYPES.get(dtype)
    if info is None:
        raise InvalidRequestError(
            f"dtype {dtype!r}: expected one of {', '.join(_BY_NAME)}", reason="DTYPE_UNSUPPORTED"
        )
    return info


# ----------------------------------------------------------------------------------------- payloads


def chunks(buffer: memoryview, size: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """Yields the buffer's bytes in pieces of at most `size` bytes. An empty buffer yields one empty
    piece, since every header needs a chunk."""
    if size < 1:
        raise ValueError(f"size={size}: expected at least 1 byte")
    data = as_bytes(buffer)
    yield data[:size]
    for start in range(size, data.nbytes, size):
        yield data[start : start + size]


def framed(
    header: HeaderT, payload: memoryview, size: int = CHUNK_BYTES
) -> Iterator[tuple[HeaderT | None, memoryview]]:
    """Yields the chunks of one partition, to be sent in order. The first chunk has the header."""
    opening: HeaderT | None = header
    for piece in chunks(payload, size):
        yield opening, piece
        opening = None


def checksum(buffer: memoryview | bytes) -> int:
    """Returns the xxh3-64 of the buffer's bytes, as used in PushHeader.checksum and
    PullHeader.checksum."""
    return xxhash.xxh3_64_intdigest(as_bytes(memoryview(buffer)))


def as_bytes(buffer: memoryview) -> memoryview:
    """Returns a view of the buffer as flat bytes. Raises ValueError unless the buffer is
    C-contiguous."""
    if not buffer.c_contiguous:
        raise ValueError(
            "the buffer is not C-contiguous; convert it with numpy.ascontiguousarray or "
            "Tensor.contiguous"
        )
    # A view without elements can be cast only if it has one dimension.
    return buffer.cast("B") if buffer.nbytes else memoryview(b"")


# ----------------------------------------------------------------------------------------- messages

# All four messages have `header` as field 1 and `payload` as field 2, both length-delimited: wire
# type 2 (tested against the descriptors).
_HEADER_TAG: Final = 1 << 3 | 2
_PAYLOAD_TAG: Final = 2 << 3 | 2


def encode_push_chunk(chunk: tuple[pb.PushHeader | None, memoryview]) -> bytes:
    """Encodes a PushChunk."""
    return _encode(*chunk)


def decode_push_chunk(data: bytes) -> tuple[pb.PushHeader | None, memoryview]:
    """Decodes a PushChunk into its header, if any, and its payload, a read-only view of `data`.
    Raises InvalidRequestError / MESSAGE_MALFORMED."""
    return _decode(data, pb.PushChunk, pb.PushHeader, InvalidRequestError)


def encode_pull_chunk(chunk: tuple[pb.PullHeader | None, memoryview]) -> bytes:
    """Encodes a PullChunk."""
    return _encode(*chunk)


def decode_pull_chunk(data: bytes) -> tuple[pb.PullHeader | None, memoryview]:
    """Decodes a PullChunk into its header, if any, and its payload, a read-only view of `data`.
    Raises CorruptDataError / MESSAGE_MALFORMED."""
    return _decode(data, pb.PullChunk, pb.PullHeader, CorruptDataError)


def encode_follow_chunk(chunk: tuple[pb.FollowHeader | None, memoryview]) -> bytes:
    """Encodes a FollowChunk."""
    return _encode(*chunk)


def decode_follow_chunk(data: bytes) -> tuple[pb.FollowHeader | None, memoryview]:
    """Decodes a FollowChunk into its header, if any, and its payload, a read-only view of `data`.
    Raises CorruptDataError / MESSAGE_MALFORMED."""
    return _decode(data, pb.FollowChunk, pb.FollowHeader, CorruptDataError)


def encode_rows_chunk(chunk: tuple[pb.RowsHeader | None, memoryview]) -> bytes:
    """Encodes a RowsChunk."""
    return _encode(*chunk)


def decode_rows_chunk(
    data: bytes, malformed: type[ShoalError]
) -> tuple[pb.RowsHeader | None, memoryview]:
    """Decodes a RowsChunk into its header, if any, and its payload, a read-only view of `data`.
    Raises `malformed` / MESSAGE_MALFORMED."""
    return _decode(data, pb.RowsChunk, pb.RowsHeader, malformed)


def _encode(
    header: pb.PushHeader | pb.PullHeader | pb.FollowHeader | pb.RowsHeader | None,
    payload: memoryview,
) -> bytes:
    parts: list[bytes | memoryview] = []
    if header is not None:
        encoded = header.SerializeToString()
        parts += [_prefix(_HEADER_TAG, len(encoded)), encoded]
    if payload.nbytes:
        parts += [_prefix(_PAYLOAD_TAG, payload.nbytes), as_bytes(payload)]
    return b"".join(parts)


def _prefix(tag: int, length: int) -> bytes:
    """Encodes a field's tag and length. The length is a varint: seven bits per byte, lowest first,
    with the high bit set on all bytes but the last."""
    out = bytearray((tag,))
    while length > 0x7F:
        out.append(length & 0x7F | 0x80)
        length >>= 7
    out.append(length)
    return bytes(out)


def _decode(
    data: bytes, message: Any, header_type: type[HeaderT], malformed: type[ShoalError]
) -> tuple[HeaderT | None, memoryview]:
    try:
        found = _decode_canonical(data, header_type)
        if found is not None:
            return found
        parsed = message.FromString(data)
    except DecodeError as error:
        name = message.DESCRIPTOR.name
        raise malformed(
            f"cannot parse {len(data)} bytes as {name}: {error}; the data is truncated or of "
            "another type",
            reason="MESSAGE_MALFORMED",
        ) from error
    return (parsed.header if parsed.HasField("header") else None), memoryview(parsed.payload)


def _decode_canonical(
    data: bytes, header_type: type[HeaderT]
) -> tuple[HeaderT | None, memoryview] | None:
    """Decodes the encoding that every protobuf library produces: the header, then the payload, each
    at most once. Returns None for any other valid or invalid encoding."""
    view = memoryview(data)
    end = len(data)
    position = 0
    header: HeaderT | None = None
    if position < end and data[position] == _HEADER_TAG:
        bounds = _field(data, position + 1)
        if bounds is None:
            return None
        header = header_type.FromString(data[bounds[0] : bounds[1]])
        position = bounds[1]
    payload = view[end:]
    if position < end and data[position] == _PAYLOAD_TAG:
        bounds = _field(data, position + 1)
        if bounds is None:
            return None
        payload = view[bounds[0] : bounds[1]]
        position = bounds[1]
    return (header, payload) if position == end else None


def _field(data: bytes, position: int) -> tuple[int, int] | None:
    """Returns the start and end of a field's contents, whose length is encoded at `position`; None
    if they exceed `data`."""
    length = 0
    for shift in range(0, 35, 7):
        if position >= len(data):
            return None
        byte = data[position]
        position += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            end = position + length
            return (position, end) if end <= len(data) else None
    return None
