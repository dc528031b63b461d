"""The framing of the bulk channel: every written frame can be read, and other bytes are refused.
The other side cannot take away its shared memory."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_common.bulk.area import AREA_BYTES, PIECES, SharedArea
from shoal_common.bulk.frames import (
    DATA_BYTES,
    GREETING_BYTES,
    HEAD_BYTES,
    LARGEST_MESSAGE_BYTES,
    TICKET_BYTES,
    Frame,
    Kind,
    greeting,
    head,
    parse_head,
    ticket_of,
)
from shoal_common.errors import CorruptDataError, InvalidRequestError


@pytest.mark.parametrize("kind", Kind)
def test_written_head_is_read_back(kind) -> None:
    assert parse_head(head(kind)) == Frame(kind, 0)
    assert len(head(kind)) == HEAD_BYTES


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        (Kind.PARTITION, LARGEST_MESSAGE_BYTES),
        (Kind.PULL, LARGEST_MESSAGE_BYTES),
        (Kind.DATA, DATA_BYTES),
        (Kind.END, 0),
    ],
)
def test_a_length_over_the_limit_of_its_kind_is_refused(kind, most) -> None:
    assert parse_head(head(kind, most)).length == most
    with pytest.raises(
        InvalidRequestError,
        match=f"{kind.name} frame has {most + 1} bytes; expected at most {most}",
    ):
        parse_head(head(kind, most + 1))


@given(st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES))
def test_arbitrary_bytes_are_a_head_or_malformed(data) -> None:
    with suppress(InvalidRequestError):
        assert head(*parse_head(data)) == data


def test_only_a_greeting_carries_its_ticket() -> None:
    ticket = bytes(range(TICKET_BYTES))
    assert ticket_of(greeting(ticket)) == ticket
    assert len(greeting(ticket)) == GREETING_BYTES
    assert ticket_of(b"GET / HTTP/1.1\r\n".ljust(GREETING_BYTES)) is None


def test_pieces_alternate_between_the_sides() -> None:
    server, descriptor = SharedArea.make()
    client = SharedArea.received(descriptor, AREA_BYTES)
    for number in range(3 * PIECES):
        sender, receiver = (client, server) if number < 2 * PIECES - 1 else (server, client)
        sender.fill(memoryview(bytes([number]) * 100))
        assert bytes(receiver.next_filled(100)) == bytes([number]) * 100
        assert sender.freed()
    for _ in range(PIECES):
        assert not client.is_full
        client.fill(memoryview(b"x"))
    assert client.is_full
    assert client.in_use == PIECES
    server.close()
    client.close()


def test_peer_cannot_shrink_shared_memory() -> None:
    """A client can neither shrink nor seal the shared memory, which would kill the server with a
    signal. Holes that it punches are filled with new pages."""
    server, descriptor = SharedArea.make()
    client = mmap.mmap(descriptor, AREA_BYTES)
    for size in (0, AREA_BYTES - 1, AREA_BYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    # KEEP_SIZE and PUNCH_HOLE
    hole = ctypes.CDLL(None).fallocate(
        descriptor, 0x1 | 0x2, ctypes.c_long(0), ctypes.c_long(AREA_BYTES)
    )
    assert hole == 0, "punching a hole succeeds, and new pages replace the old"
    client[:4] = b"data"
    assert bytes(server.next_filled(4)) == b"data"
    server.close()
    client.close()
    os.close(descriptor)


@pytest.mark.parametrize("nbytes", [AREA_BYTES, 4096])
def test_unsealed_memory_is_refused(nbytes) -> None:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    with pytest.raises(CorruptDataError, match="expected"):
        SharedArea.received(descriptor, nbytes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_area_is_closed_even_while_a_view_is_alive() -> None:
    server, descriptor = SharedArea.make()
    os.close(descriptor)
    looking = server.next_filled(10)
    server.close()
    assert looking.nbytes == 10
