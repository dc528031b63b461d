"""Format of a journal record: one change to a server, with a checksum that identifies complete
records.

    magic        8 bytes
    file         8 bytes: number of the record's file; data behind the records may be from an older
    file
    header size  4 bytes, little-endian, like all numbers
    payload size 8 bytes
    durable      8 bytes: bytes of this file known to be on disk when this record was written
    checksum     8 bytes: xxh3-64 of all of the above, of the record's offset in the file, and of
                 what follows; seeded with the journal's id, so that no part of a received payload
                 can be mistaken for a record
    header       JSON
    payload      a partition as received from a member or another server; empty in records without
                 one

`durable` distinguishes a write that a crash has interrupted, which was never acknowledged, from
damage to acknowledged data (segments.py).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash

MAGIC: Final = b"\x89shoalR\n"

_FIXED: Final = struct.Struct("<8sQIQQ")
_CHECKSUM: Final = struct.Struct("<Q")
_LARGEST_HEADER: Final = 256 << 20
_LARGEST_PAYLOAD: Final = 1 << 30
OVERHEAD_BYTES: Final = _FIXED.size + _CHECKSUM.size
_NOTHING: Final = memoryview(b"")


@dataclass(frozen=True, kw_only=True)
class Record:
    """Record of one change to a server."""

    kind: str
    """Kind of the change. `recovery.py` defines all kinds and their fields."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Contents of the record except its payload, as JSON-compatible values."""
    payload: memoryview = _NOTHING

    def encoded(
        self, journal_id: int, *, file: int, at: int, durable: int
    ) -> tuple[bytes, memoryview]:
        """Returns the bytes before the payload, and the payload itself, which is not copied.

        `at`: offset of the record in the file. `file`, `durable`: see the module's docstring.
        """
        header = json.dumps(
            {"kind": self.kind, **self.fields}, separators=(",", ":"), allow_nan=False
        ).encode()
        fixed = _FIXED.pack(MAGIC, file, len(header), self.payload.nbytes, durable)
        return fixed + _CHECKSUM.pack(
            _digest(journal_id, at, fixed, header, self.payload)
        ) + header, self.payload


@dataclass(frozen=True, kw_only=True)
class Found:
    """A complete record found in a file."""

    record: Record
    end: int
    """Offset of the next record."""
    durable: int


def read(data: memoryview, start: int, journal_id: int, file: int) -> Found | None:
    """Returns the record that starts at `start`. Returns None if there is no complete and valid
    record of this journal and file."""
    if start + OVERHEAD_BYTES > data.nbytes:
        return None
    magic, number, header_size, payload_size, durable = _FIXED.unpack_from(data, start)
    if (
        (magic, number) != (MAGIC, file)
        or durable > start
        or header_size > _LARGEST_HEADER
        or payload_size > _LARGEST_PAYLOAD
    ):
        return None
    body = start + OVERHEAD_BYTES
    end = body + header_size + payload_size
    if end > data.nbytes:
        return None
    found = _digest(
        journal_id,
        start,
        data[start : start + _FIXED.size],
        data[body : body + header_size],
        data[body + header_size : end],
    )
    if found != _CHECKSUM.unpack_from(data, start + _FIXED.size)[0]:
        return None
    try:
        fields = json.loads(bytes(data[body : body + header_size]))
        kind = str(fields.pop("kind"))
    except (ValueError, AttributeError, KeyError, TypeError):
        return None
    return Found(
        record=Record(kind=kind, fields=fields, payload=data[body + header_size : end]),
        end=end,
        durable=durable,
    )


def read_all(data: memoryview, journal_id: int, file: int) -> Iterator[Found]:
    """Yields consecutive valid records of a file, up to the first invalid one."""
    start = 0
    while (found := read(data, start, journal_id, file)) is not None:
        yield found
        start = found.end


def later(data: memoryview, start: int, journal_id: int, file: int) -> Iterator[Found]:
    """Yields valid records that start anywhere after `start`. Used to find records behind damaged
    data."""
    for position in _places(data, start + 1):
        if (found := read(data, position, journal_id, file)) is not None:
            yield found


def _digest(journal_id: int, at: int, *parts: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64(seed=journal_id)
    digest.update(_CHECKSUM.pack(at))
    for part in parts:
        digest.update(part)
    value: int = digest.intdigest()
    return value


def _places(data: memoryview, start: int) -> Iterator[int]:
    """Yields the offsets of all occurrences of the magic. Searches piece by piece. The pieces
    overlap, so that an occurrence across a border is found exactly once."""
    step = 1 << 24
    for piece in range(start, data.nbytes, step):
        part = bytes(data[piece : piece + step + len(MAGIC) - 1])
        at = part.find(MAGIC)
        while at >= 0:
            yield piece + at
            at = part.find(MAGIC, at + 1)
