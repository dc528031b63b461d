"""The number of bytes that this process has sent over its TCP connections, read from the kernel:
all bytes, no matter which library sent them.

For each connected socket, these are the bytes that the peer has acknowledged (TCP_INFO,
tcpi_bytes_acked) and the bytes that are still queued (SIOCOUTQ). Retransmissions and headers do not
count; everything that a library wrote counts in full. Linux only.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_TCP_INFO_BYTES: Final = 256
_BYTES_ACKED: Final = 120
"""Offset of tcpi_bytes_acked in struct tcp_info (linux/tcp.h); tcpi_bytes_received follows it."""


class Traffic(NamedTuple):
    """Traffic of all current connections of this process, since each was opened."""

    sent: int
    received: int

    def since(self, before: Traffic) -> Traffic:
        """Returns the traffic since then. Connections that have been closed in between are not
        counted, so the caller must ensure that there are none."""
        return Traffic(self.sent - before.sent, self.received - before.received)


def traffic() -> Traffic:
    """Returns the current traffic."""
    connections: dict[str, Traffic] = {}  # by inode: a socket may have several descriptors
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile, or no socket
            target = str(link.readlink())
            if target.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as connection:
                    connections[target] = _of(connection)
    return Traffic(
        sum(each.sent for each in connections.values()),
        sum(each.received for each in connections.values()),
    )


def _of(connection: socket.socket) -> Traffic:
    """Raises OSError if the socket is not a connected TCP socket."""
    connection.getpeername()
    if (
        connection.family not in (socket.AF_INET, socket.AF_INET6)
        or connection.type != socket.SOCK_STREAM
    ):
        return Traffic(0, 0)
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    acknowledged, received = struct.unpack_from("=QQ", info, _BYTES_ACKED)
    (queued,) = struct.unpack("=i", fcntl.ioctl(connection, termios.TIOCOUTQ, struct.pack("=i", 0)))
    return Traffic(acknowledged + queued, received)
