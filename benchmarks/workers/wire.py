"""Reads from the kernel how many bytes this process has sent and received over its TCP connections,
regardless of the library that sent them. Linux only.

The sent bytes of a connected socket are those that the peer has acknowledged (TCP_INFO,
tcpi_bytes_acked) and those that are still queued (SIOCOUTQ). Retransmissions and TCP/IP headers are
not counted; everything that a library wrote to the socket is.
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
    """Bytes sent and received over all open connections of this process, each since it was
    opened."""

    sent: int
    received: int

    def since(self, before: Traffic) -> Traffic:
        """Returns the traffic since the reading `before`. No connection may have been closed since
        then, because its traffic would be missing."""
        return Traffic(self.sent - before.sent, self.received - before.received)


def traffic() -> Traffic:
    """Returns the traffic of all open connections of this process so far."""
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
    """Returns the traffic of one connection. Raises OSError if the socket is not a connected TCP
    socket."""
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
