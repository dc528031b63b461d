"""Which peers this process cannot reach: looked at after a collective ran into its deadline or a generation did not form.

Gloo and NCCL seldom say who failed them. Two members between which a link is cut would form generations without end; so each finds out for
itself whom it reaches, and the coordinator keeps two that accuse each other apart. A peer that hangs is reached: its kernel answers.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Final

from shoal_common.settings import parse_address

from shoal_worker.elastic.transfer import PROBE

_LOOK_S: Final = 0.05


def unreachable(peers: Mapping[int, str], *, timeout: timedelta, given_up: Callable[[], bool]) -> list[int]:
    """Ranks whose `donor_address` (host:port, by rank) takes no connection within `timeout`; empty once `given_up` says so."""
    if given_up():
        return []
    deadline = time.monotonic() + timeout.total_seconds()
    left = set(peers)
    with ExitStack() as stack, selectors.DefaultSelector() as waiting:
        for rank, address in peers.items():
            with suppress(OSError):  # it stays among those left
                connection = stack.enter_context(_start_connecting(address))
                waiting.register(connection, selectors.EVENT_WRITE, (rank, connection))
        while waiting.get_map() and time.monotonic() < deadline and not given_up():
            for key, _ in waiting.select(_LOOK_S):
                rank, connection = key.data
                waiting.unregister(connection)
                with suppress(OSError):  # nobody took the connection: it stays among those left
                    connection.send(PROBE)  # fails if connecting did
                    left.discard(rank)
    return [] if given_up() else sorted(left)


def _start_connecting(address: str) -> socket.socket:
    """Raises OSError."""
    parsed = parse_address(address)
    family, kind, protocol, _, endpoint = socket.getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    status = connection.connect_ex(endpoint)
    if status not in (0, errno.EINPROGRESS):
        connection.close()
        raise OSError(status, os.strerror(status))
    return connection
