"""Configures the sockets at both ends of a bulk channel, and checks who is at the other end of a
local connection."""

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
"""TCP options that detect a vanished peer about as fast as gRPC's keepalive. Options unsupported by
the system are omitted."""
_CREDENTIALS: Final = struct.Struct("3i")


def connect(host: str, port: int, until: float) -> socket.socket:
    """Opens a TCP connection to the first address of `host` that accepts one. Raises OSError.

    `until`: deadline, by the monotonic clock.
    """
    failure = OSError(f"host {host} has no address")
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
    """Returns the seconds left until `until`, a time of the monotonic clock. The result is at least
    0.001, because some functions treat 0 as unlimited or non-blocking."""
    return max(0.001, until - time.monotonic())


def configure(connected: socket.socket) -> None:
    """Sets options of a TCP connection. Does nothing for a Unix socket."""
    if connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


def is_own_user(connected: socket.socket) -> bool:
    """Returns whether the process at the other end of a Unix socket belongs to this user or to
    root. Abstract socket names are open to every user, so the peer must be checked."""
    _, user, _ = _CREDENTIALS.unpack(
        connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return user in (os.geteuid(), 0)
