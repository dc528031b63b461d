"""Access to bulk channels on one machine by other processes, and the time until a vanished peer is
noticed."""

from __future__ import annotations

import os
import socket

import pytest
from shoal_common.bulk import sockets


def test_another_users_process_is_distinguished_from_ones_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert sockets.is_own_user(one)
        asked = socket.socket.getsockopt
        monkeypatch.setattr(
            socket.socket,
            "getsockopt",
            lambda *_: sockets._CREDENTIALS.pack(1, os.geteuid() + 1, 1),
        )
        assert not sockets.is_own_user(one)
        monkeypatch.setattr(socket.socket, "getsockopt", asked)


def test_both_ends_of_a_tcp_connection_notice_a_peer_that_vanished_within_a_minute() -> None:
    with socket.socket() as connection:
        sockets.configure(connection)
        idle = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        probes = connection.getsockopt(
            socket.IPPROTO_TCP, socket.TCP_KEEPINTVL
        ) * connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle + probes < 60
