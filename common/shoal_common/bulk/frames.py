"""Framing of a bulk channel: which bytes go over it, in which order, and how large each may be.
Pure; both ends use it.

The client opens a connection with `greeting`: a magic number and the ticket that OpenData gave.
From then on both sides send frames. A frame is a head of 8 bytes (its kind, three zeros, a length
as a big-endian u32) and what its kind says:

    READY      server   bytes of shared memory that this connection has; 0: none. With memory, its
               descriptor comes along (SCM_RIGHTS)
    INITIALIZE client   begins an upload of first values; length 0
    PUSH       client   begins an upload of gradients; length 0
    PULL       client   a PullRequest
    PARTITION  both     a partition begins: a PushHeader or a PullHeader; its payload comes in
               frames of DATA
    DATA       both     length bytes of payload: behind the head, or, with shared memory, at the
               beginning of the next piece of it
    END        both     the upload, or the answer to a pull, is complete; length 0
    RESULT     server   a PushResponse, after END
    ERROR      server   a google.rpc.Status, in the place of RESULT or of anything in the answer to
               a pull. After one in the middle of an upload the server reads on to END, and passes
               all over; the client sends END at the next frame
    FREE       both     with shared memory: the oldest piece that holds data has been read, and may
               be written again; length 0

One stream (an upload or a pull) goes over a connection at a time. Pieces of shared memory are used
in turn, by whichever side sends. Whatever breaks these rules ends the connection.
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
    """Kinds of frames."""

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
    """Head of a frame."""

    kind: Kind
    length: int


def greeting(ticket: bytes) -> bytes:
    """Returns a client's first bytes."""
    return MAGIC + ticket


def ticket_of(greeted: bytes) -> bytes | None:
    """Returns the ticket in a greeting of GREETING_BYTES; None if it is invalid."""
    return greeted[len(MAGIC) :] if greeted.startswith(MAGIC) else None


def head(kind: Kind, length: int = 0) -> bytes:
    """Returns a frame's first bytes."""
    return _HEAD.pack(kind, _ZEROS, length)


def parse_head(data: bytes | bytearray | memoryview) -> Frame:
    """Parses a frame's head. Raises InvalidRequestError / STREAM_MALFORMED for an invalid head or a
    length above the limit of its kind."""
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
    """Returns the error for a peer that violates the protocol."""
    return InvalidRequestError(
        f"bulk channel: {what}; the peer uses another protocol, or the data was corrupted",
        reason="STREAM_MALFORMED",
    )
