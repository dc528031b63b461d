"""Items that servers send to each other, and their conversion to and from messages. A backup
receives first the complete state of its primary and then each change. The receiver of a move
receives the partitions.

The fields of an item are JSON in the format of snapshots and the journal, so that a backup restores
and replays state with the same code as a server that starts.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from shoal_common.errors import CorruptDataError
from shoal_common.formats.wire import decode_follow_chunk, encode_follow_chunk, framed
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.storage.record import Record

FORMAT_VERSION: Final = 4
"""Version of the format. It is incremented when other releases could not read the items."""
LARGEST_ITEM_BYTES: Final = 1 << 30
_NOTHING: Final = memoryview(b"")

STATE: Final = pb.FollowHeader.KIND_STATE
PARTITION: Final = pb.FollowHeader.KIND_PARTITION
WHOLE: Final = pb.FollowHeader.KIND_WHOLE
RECORD: Final = pb.FollowHeader.KIND_RECORD


@dataclass(frozen=True, kw_only=True)
class Item:
    """One item sent to another server."""

    kind: int
    """Kind of the item: STATE, PARTITION, WHOLE or RECORD."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Contents of the item except its payload, as JSON-compatible values."""
    payload: memoryview = _NOTHING
    position: int = 0
    """Position of a record in its stream: 1, 2, 3, ...; 0 for items that are not records."""

    def encoded(self) -> Iterator[bytes]:
        """Yields the encoded FollowChunks of the item."""
        header = pb.FollowHeader(
            kind=pb.FollowHeader.Kind.ValueType(self.kind),
            fields=json.dumps(self.fields, separators=(",", ":"), allow_nan=False).encode(),
            payload_bytes=self.payload.nbytes,
            position=self.position,
        )
        return map(encode_follow_chunk, framed(header, self.payload))

    @classmethod
    def of_record(cls, record: Record, position: int) -> Item:
        """Converts the record of a change to an item, to be sent to another server."""
        return cls(
            kind=RECORD,
            fields={"kind": record.kind, **record.fields},
            payload=record.payload,
            position=position,
        )

    def record(self) -> Record:
        """Returns the record in an item. Inverse of `of_record`."""
        fields = dict(self.fields)
        return Record(kind=str(fields.pop("kind")), fields=fields, payload=self.payload)


async def received_items(messages: AsyncIterator[bytes]) -> AsyncGenerator[Item]:
    """Yields the items of a stream, each with its complete payload. Raises CorruptDataError if the
    stream is invalid."""
    header: pb.FollowHeader | None = None
    payload, came = memoryview(b""), 0
    async for data in messages:
        opening, piece = decode_follow_chunk(data)
        if opening is not None:
            if header is not None:
                raise _malformed(
                    f"an item began after {came} of {header.payload_bytes} bytes of the previous "
                    "item"
                )
            if not 0 <= opening.payload_bytes <= LARGEST_ITEM_BYTES:
                raise _malformed(
                    f"payload_bytes={opening.payload_bytes}: expected 0 to {LARGEST_ITEM_BYTES}"
                )
            header, payload, came = opening, memoryview(bytearray(opening.payload_bytes)), 0
        elif header is None:
            raise _malformed("the first chunk of an item has no header")
        if came + piece.nbytes > header.payload_bytes:
            raise _malformed(
                f"received {came + piece.nbytes} bytes of an item, but its header declares "
                f"{header.payload_bytes}"
            )
        payload[came : came + piece.nbytes] = piece
        came += piece.nbytes
        if came == header.payload_bytes:
            yield Item(
                kind=header.kind,
                fields=_fields(header.fields),
                payload=payload,
                position=header.position,
            )
            header = None
    if header is not None:
        raise _malformed(f"it ended after {came} of {header.payload_bytes} bytes of an item")


def _fields(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise _malformed(f"cannot parse the fields of an item as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _malformed(
            f"the fields of an item are a JSON {type(fields).__name__}; expected an object"
        )
    return fields


def _malformed(what: str) -> CorruptDataError:
    return CorruptDataError(
        f"invalid stream from the other server: {what}", reason="STREAM_MALFORMED"
    )
