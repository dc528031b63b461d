"""Framing of a bulk channel: the bytes sent, their order, and the size limits. Contains no I/O and
is used by both ends.

The client opens a connection with `greeting`: a magic number and the ticket that OpenData returned.
With shared memory, payload travels in a ring of fixed-size pieces (`area.py`), which the sender
fills in turn. After the greeting, both sides send frames. A frame consists of an 8-byte header
(kind, three zeros, length as a big-endian u32) and content that depends on the kind:

    READY      server   length: bytes of the connection's shared memory; 0: none. The memory's
                        descriptor is attached (SCM_RIGHTS)
    INITIALIZE client   starts an upload of first values; length 0
    PUSH       client   starts an upload of gradients; length 0
    PULL       client   a PullRequest
    PARTITION  both     starts a partition: a PushHeader or a PullHeader; the payload follows in
                        DATA frames
    DATA       both     `length` bytes of payload: after the header or, with shared memory, at the
                        start of the next piece
    END        both     the upload, or the response to a pull, is complete; length 0
    RESULT     server   a PushResponse, after END
    ERROR      server   a google.rpc.Status, in place of RESULT or at any point of the response to a
                        pull. After an ERROR during an upload the client sends END as its next
                        frame, and the server discards all frames up to END
    FREE       both     with shared memory: the oldest filled piece has been read and may be
                        written again; length 0

A connection carries one stream (an upload or a pull) at a time. Any violation of these rules closes
the connection.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

from shoal_common.errors import InvalidRequestError

MAGIC: Final = b"SHOALBD1"
TICKET_BYTES: Final = 32
GREETING_BYTES: Final = len(MAGIC) + TICKET_BYTES

DATA_BYTES: Final = 2 << 20
"""Maximum payload of one DATA frame, for senders and receivers."""
LARGEST_MESSAGE_BYTES: Final = 4 << 20
"""Maximum size of a protobuf message in a frame."""

_HEAD: Final = struct.Struct("!B3sI")
HEAD_BYTES: Final = _HEAD.size
_ZEROS: Final = bytes(3)


class Kind(enum.IntEnum):
    """Kind of frame."""

    READY = 1
    INITIALIZE = 2
    PUSH = 3
    PULL = 4
    PARTITION = 5
    DATA = 6
    END = 7
    RESULT = 8
    ERROR = 9
    FREE = 10


_LARGEST: Final = {
    Kind.READY: 1 << 30,
    Kind.INITIALIZE: 0,
    Kind.PUSH: 0,
    Kind.PULL: LARGEST_MESSAGE_BYTES,
    Kind.PARTITION: LARGEST_MESSAGE_BYTES,
    Kind.DATA: DATA_BYTES,
    Kind.END: 0,
    Kind.RESULT: LARGEST_MESSAGE_BYTES,
    Kind.ERROR: LARGEST_MESSAGE_BYTES,
    Kind.FREE: 0,
}


class Frame(NamedTuple):
    """Header of a frame."""

    kind: Kind
    length: int


def greeting(ticket: bytes) -> bytes:
    """Returns the bytes that a client sends first: the magic number and the ticket."""
    return MAGIC + ticket


def ticket_of(greeted: bytes) -> bytes | None:
    """Returns the ticket in a greeting, which has GREETING_BYTES bytes; None if the greeting is
    invalid."""
    return greeted[len(MAGIC) :] if greeted.startswith(MAGIC) else None


def head(kind: Kind, length: int = 0) -> bytes:
    """Encodes the header of a frame."""
    return _HEAD.pack(kind, _ZEROS, length)


def parse_head(data: bytes | bytearray | memoryview) -> Frame:
    """Parses the header of a frame. Raises InvalidRequestError / STREAM_MALFORMED if it is invalid,
    or if the length exceeds the limit for frames of this kind."""
    number, zeros, length = _HEAD.unpack(data)
    try:
        kind = Kind(number)
    except ValueError:
        kind = None
    if kind is None or zeros != _ZEROS:
        raise malformed(f"the bytes {bytes(data).hex()} are not a frame header")
    if length > _LARGEST[kind]:
        raise malformed(
            f"a {kind.name} frame has {length} bytes; expected at most {_LARGEST[kind]}"
        )
    return Frame(kind, length)


def malformed(what: str) -> InvalidRequestError:
    """Returns the error to raise if the peer violates the protocol of the bulk channel."""
    return InvalidRequestError(
        f"bulk channel: {what}; the peer uses another protocol, or the data was corrupted",
        reason="STREAM_MALFORMED",
    )
