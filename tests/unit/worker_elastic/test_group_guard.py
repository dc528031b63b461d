"""Sockets that a group guards are shut down when the group ends."""

import socket

from shoal_worker.elastic.contract.generation import Generation, Peer
from shoal_worker.elastic.group.group import Group


def group_of_one() -> Group:
    me = Peer(rank=0, member_id="a", host="localhost", donor_address="", joining=False)
    return Group(
        Generation(number=1, nonce="0" * 32, peers=(me,), rank=0, interrupts_below=0), None, None
    )


def ended(other_end: socket.socket) -> bool:
    other_end.settimeout(5)
    return other_end.recv(1) == b""


def test_a_guarded_socket_is_shut_down_when_the_group_is_over() -> None:
    group = group_of_one()
    ours, theirs = socket.socketpair()
    with ours, theirs, group.guarding() as guard:
        guard(ours)
        group.abort("superseded")
        assert ended(theirs)


def test_socket_guarded_too_late_is_shut_down_at_once() -> None:
    group = group_of_one()
    ours, theirs = socket.socketpair()
    with ours, theirs, group.guarding() as guard:
        group.abort("superseded")
        guard(ours)
        assert ended(theirs)


def test_socket_is_released_when_its_transfer_is_over() -> None:
    group = group_of_one()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with group.guarding() as guard:
            guard(ours)
        group.abort("superseded")
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"
