"""Messages between a launcher and its warm process: JSON with file descriptors, over a Unix stream
socket."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

_LENGTH: Final = struct.Struct("!I")
_MOST_DESCRIPTORS: Final = 8


def send(
    connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()
) -> None:
    """Sends one message with duplicates of `descriptors`. Raises OSError, or TimeoutError after the
    socket's timeout."""
    data = json.dumps(message).encode()
    data = _LENGTH.pack(len(data)) + data
    sent = socket.send_fds(connection, [data], descriptors)
    connection.sendall(data[sent:])


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns the next message and its descriptors. The caller must close them; child programs do
    not inherit them.

    Raises EOFError if the other side has closed the connection, TimeoutError after the socket's
    timeout, and OSError.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, _MOST_DESCRIPTORS)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    head += _read(connection, _LENGTH.size - len(head)) if head else b""
    if not head:
        raise EOFError("the other side closed the connection")
    message: dict[str, Any] = json.loads(_read(connection, _LENGTH.unpack(head)[0]))
    return message, list(descriptors)


def _read(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size > 0:
        data = connection.recv(size)
        if not data:
            raise EOFError("the other side closed the connection in the middle of a message")
        parts.append(data)
        size -= len(data)
    return b"".join(parts)
