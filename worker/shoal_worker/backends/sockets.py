"""Finds and shuts the TCP sockets of one Gloo group, which Gloo itself offers no way to do.

Gloo keeps a collective waiting until its sockets close, and neither its abort nor its shutdown closes them. So we learn which descriptors
of this process are a group's and shut those down: each pending operation then fails at once, here and, by the broken connection, at the
peers. The descriptors stay open until Gloo closes them itself, so a number is never pulled from under it. Listening sockets are left
alone, and so is every socket that is not the group's (gRPC, Redis): a socket is told by its inode, never by its number alone.

Linux only (/proc/self/fd). Threads: functions here may be called from any thread; a `GroupSockets` never changes once made.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

Endpoint = tuple[str, int]
"""Numeric address and port."""


@dataclass(frozen=True, kw_only=True)
class OpenSocket:
    """A TCP socket that this process holds."""

    descriptor: int
    inode: int
    listening: bool
    local: Endpoint
    remote: Endpoint | None


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupSockets:
    """The sockets of one formed group: `connected` to its peers, and the `listener` through which they came."""

    connected: tuple[OpenSocket, ...]
    listener: OpenSocket

    def shut_down(self) -> int:
        """Breaks every connection of the group; the number of those that were still open. Never blocks, any thread, idempotent."""
        return sum(_shut_down(one) for one in self.connected)

    def still_open(self) -> int:
        """How many descriptors of the group Gloo has not closed yet, its listener's included."""
        return sum(_is_same(one.descriptor, one.inode) for one in (*self.connected, self.listener))


def open_sockets() -> Iterator[OpenSocket]:
    """All TCP sockets of this process."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        found = _inspect(int(name))
        if found is not None:
            yield found


def listeners() -> dict[int, OpenSocket]:
    """The listening TCP sockets of this process, by inode."""
    return {one.inode: one for one in open_sockets() if one.listening}


def group_sockets(listener: OpenSocket, peers: Collection[Endpoint]) -> GroupSockets:
    """What belongs to the group of `listener`: connections that came in through it, and those that lead to a peer's listener."""
    connected = tuple(one for one in open_sockets() if one.remote is not None and (one.local == listener.local or one.remote in peers))
    sockets = GroupSockets(connected=connected, listener=listener)
    _LIVE.add(sockets)
    return sockets


def _inspect(descriptor: int) -> OpenSocket | None:
    """Looks at a duplicate, so that a descriptor that another thread closes and reuses meanwhile is never mixed up."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        with socket.socket(fileno=os.dup(descriptor)) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                return None
            listening = bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            remote: Endpoint | None = None
            if not listening:
                with contextlib.suppress(OSError):
                    remote = one.getpeername()[:2]
            return OpenSocket(
                descriptor=descriptor,
                inode=os.fstat(one.fileno()).st_ino,
                listening=listening,
                local=one.getsockname()[:2],
                remote=remote,
            )
    except OSError:
        # Closed since it was listed.
        return None


def _is_same(descriptor: int, inode: int) -> bool:
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


def _shut_down(one: OpenSocket) -> bool:
    try:
        duplicate = socket.socket(fileno=os.dup(one.descriptor))
    except OSError:
        return False
    with duplicate:
        if not _is_same(duplicate.fileno(), one.inode):
            return False
        with contextlib.suppress(OSError):  # the peer was faster
            duplicate.shutdown(socket.SHUT_RDWR)
        return True


_LIVE: Final[weakref.WeakSet[GroupSockets]] = weakref.WeakSet()
"""Of this process, so that a forked child can let go of them."""


def _let_go_in_child() -> None:
    """A forked child (a DataLoader's worker) holds copies of the sockets, and peers would not see this rank's death before the child's.

    The numbers stay taken, by /dev/null: Gloo's objects in the child still know them.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for sockets in _LIVE:
        for one in (*sockets.connected, sockets.listener):
            if _is_same(one.descriptor, one.inode):
                os.dup2(null, one.descriptor, inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_let_go_in_child)
