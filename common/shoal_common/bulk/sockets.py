"""How both ends of a bulk channel set up their sockets, and who may be at the other end of one on
the same machine."""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Final

_KEEPALIVE: Final = {
    "TCP_KEEPIDLE": 20,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 30_000,
}
"""Peers that vanished without closing are found after about as long as gRPC's keepalive takes.
Options that a system lacks are left out."""
_CREDENTIALS: Final = struct.Struct("3i")


def connect(host: str, port: int, until: float) -> socket.socket:
    """Makes a TCP connection to the first of a host's addresses that takes one, up to the moment
    `until` on the monotonic clock. Raises OSError."""
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        connected = socket.socket(family, kind, protocol)
        try:
            connected.settimeout(left_s(until))
            connected.connect(address)
            return connected
        except OSError as error:
            connected.close()
            failure = error
        except BaseException:
            connected.close()
            raise
    raise failure


def left_s(until: float) -> float:
    """Seconds up to a moment on the monotonic clock, for what takes nought for no limit, or for not
    to wait."""
    return max(0.001, until - time.monotonic())


def configure(connected: socket.socket) -> None:
    """Sets a TCP connection up; one on the same machine needs nothing."""
    if connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


def is_own_user(connected: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is this process's user's: any user may
    listen on, or connect to, a name that is not in a file system. That of root counts, who may do
    everything."""
    _, user, _ = _CREDENTIALS.unpack(
        connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return user in (os.geteuid(), 0)
