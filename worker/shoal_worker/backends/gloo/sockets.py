"""The TCP sockets of one Gloo group. This module finds them, breaks them, and detects that a peer
has broken one.

A wait in Gloo ends only when the socket that it waits for is closed. Gloo's abort and shutdown do
not close sockets, and losing another connection of the same group does not end the wait. This
module therefore finds the sockets of a group and keeps a copy (dup) of each. Shutting a copy down
breaks the connection itself: local waits fail, and the peer notices.

One thread per group watches the copies and reports a closed connection after a delay. Then all of
the group's connections are broken, so that the group fails on all ranks. Because of the delay, a
rank can leave without an error on its peers, although it has completed the last collective a little
before they have.

Listening sockets, and sockets that do not belong to the group (gRPC, Redis), are not touched. Linux
only (/proc/self/fd, epoll).

Threads: all functions and methods may be called from any thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import struct
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

from shoal_common.system.own_address import route_towards
from torch.distributed import PrefixStore, Store, TCPStore

from shoal_worker.backends.base import Traffic
from shoal_worker.settings import gloo_interface
from shoal_worker.store.redis_store import RedisStore

# ------------------------------------------------------------------------------ this host's address
#
# Determines this host's address for peers, without resolving the hostname, which often yields
# 127.0.1.1 or nothing.


def address_for(store: Store) -> str | None:
    """Returns the address of the interface that reaches the store's server. Returns None if Gloo
    should select the interface, by GLOO_SOCKET_IFNAME or the hostname."""
    if gloo_interface():
        return None
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    server: tuple[str, int] | None = None
    if isinstance(store, RedisStore):
        server = store.server
    elif isinstance(store, TCPStore):
        server = (store.host, store.port)
    return route_towards(*server) if server is not None else None


Endpoint = tuple[str, int]
"""Numeric address and port."""

# -------------------------------------------------------------------------------- a group's sockets

GRACE_S: Final = 0.25
"""Maximum expected time between the first and the last rank's completion of a collective, in
seconds."""

_SEND_BYTES: Final = 1 << 19
"""Size of the send buffer of a connection within this host; the kernel doubles the value for its
own needs.

By default, the buffer accepts 4 MiB at a time. They are copied under a lock while Gloo's other
thread spins in epoll_wait; the spinning takes a quarter of all processor time
(docs/explanation/backends.md#gloo-faster-collectives). Connections between hosts need more data in
flight and keep the kernel's default size.
"""

_PIECE_BYTES: Final = 1 << 18

_U64: Final = struct.Struct("=Q")
_BYTES_ACKED_AT: Final = 120
_BUSY_TIME_AT: Final = 168
_TCP_INFO_BYTES: Final = 176
"""Two offsets in the kernel's struct tcp_info (linux/tcp.h), and the size that includes both
fields. The offsets never change, because new fields are appended."""

_SCANNING: Final = threading.Lock()
"""Lock held during a scan of all sockets. A scan temporarily copies each socket, and a concurrent
scan must not find these copies."""


@dataclass(frozen=True, kw_only=True)
class Listener:
    """A listening TCP socket of this process. The inode distinguishes it from a later socket with
    the same descriptor."""

    descriptor: int
    inode: int
    endpoint: Endpoint


def listeners() -> dict[int, Listener]:
    """Returns the listening TCP sockets of this process by inode."""
    found = {}
    with _SCANNING:
        for descriptor, copy in _tcp_copies():
            with copy:
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    inode = os.fstat(copy.fileno()).st_ino
                    found[inode] = Listener(
                        descriptor=descriptor, inode=inode, endpoint=copy.getsockname()[:2]
                    )
    return found


class GroupSockets:
    """Copies of one group's connections: connections accepted by the group's listener, and
    connections opened to a peer's listener."""

    def __init__(self, listener: Listener, peers: Collection[Endpoint]) -> None:
        self._copies: list[socket.socket] = []
        self._originals = [(listener.descriptor, listener.inode)]
        with _SCANNING:
            for descriptor, copy in _tcp_copies():
                remote = _remote(copy)
                if remote is not None and (
                    copy.getsockname()[:2] == listener.endpoint or remote in peers
                ):
                    self._copies.append(copy)
                    if remote[0] == copy.getsockname()[0]:
                        copy.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
                    self._originals.append((descriptor, os.fstat(copy.fileno()).st_ino))
                else:
                    copy.close()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watcher: threading.Thread | None = None
        self._closing = threading.Lock()
        self._closed = self._broken = False
        _LIVE.add(self)

    def __len__(self) -> int:
        return len(self._copies)

    def traffic(self) -> dict[str, Traffic]:
        """Returns the traffic of the connections by peer address. For several connections to one
        address, the bytes are summed, and `busy_s` is the largest value. Callable from any
        thread."""
        found: dict[str, Traffic] = {}
        for copy in self._copies:
            with contextlib.suppress(OSError):  # closed by another thread, or broken
                sent, address = _sent(copy), copy.getpeername()[0]
                before = found.get(address, Traffic(acknowledged_bytes=0, busy_s=0.0))
                found[address] = Traffic(
                    acknowledged_bytes=before.acknowledged_bytes + sent.acknowledged_bytes,
                    busy_s=max(before.busy_s, sent.busy_s),
                )
        return found

    def shut_down(self) -> None:
        """Breaks every connection of the group. Never blocks; idempotent."""
        self._broken = True
        for copy in self._copies:
            with contextlib.suppress(OSError):  # broken already, or closed
                copy.shutdown(socket.SHUT_RDWR)

    def drain(self) -> None:
        """Discards the data that the kernel still has for the broken connections, so that Gloo's
        loop finds no more data to write to tensors. The kernel accepts no further data for these
        connections. Never blocks; idempotent."""
        with self._closing:
            self._drain()

    def _drain(self) -> None:
        for copy in self._copies if self._broken and not self._closed else ():
            with contextlib.suppress(OSError):  # it was reset
                while copy.recv(_PIECE_BYTES, socket.MSG_DONTWAIT):
                    pass

    def watch(self, lost: Callable[[str], None]) -> None:
        """Starts a thread that waits until a connection of the group closes and, GRACE_S later,
        calls `lost` with a description. The thread ends after this call, or when `close` is
        called."""
        arguments = (self._stop, list(self._copies), lost)
        self._watcher = threading.Thread(
            target=_watch, args=arguments, name="shoal-gloo-watch", daemon=True
        )
        self._watcher.start()

    def close(self) -> None:
        """Stops watching, and closes this object's copies of the sockets. Gloo's own sockets, and
        therefore its connections, stay open. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._drain()
            self._closed = True
        os.eventfd_write(self._stop, 1)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        for copy in self._copies:
            copy.close()
        os.close(self._stop)

    def let_go_in_child(self, null: int) -> None:
        """Closes a forked child's copies of the connections. Replaces their descriptors with the
        file descriptor `null`, because Gloo's objects in the child still refer to these numbers."""
        for copy in self._copies:
            copy.close()
        for descriptor, inode in self._originals:
            if _is_same(descriptor, inode):
                os.dup2(null, descriptor, inheritable=False)


def _watch(stop: int, copies: list[socket.socket], lost: Callable[[str], None]) -> None:
    names: dict[int, Endpoint | None] = {}
    with select.epoll() as poll:
        poll.register(stop, select.EPOLLIN)
        for copy in copies:
            with contextlib.suppress(OSError, ValueError):  # closed already
                names[copy.fileno()] = _remote(copy)
                poll.register(copy.fileno(), select.EPOLLRDHUP)
        del copies
        ended = [descriptor for descriptor, _ in poll.poll()]
    stopping = select.poll()  # select() does not accept descriptors above 1023
    stopping.register(stop, select.POLLIN)
    if stop in ended or stopping.poll(GRACE_S * 1000):
        return
    remote = names[ended[0]]
    lost("a peer closed the connection" + (f" ({remote[0]}:{remote[1]})" if remote else ""))


def _tcp_copies() -> Iterator[tuple[int, socket.socket]]:
    """Yields the descriptor and a copy of each TCP socket. A copy remains valid even if the
    original descriptor is reused. The caller must hold `_SCANNING` until it has closed all copies
    that it does not keep."""
    seen = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        descriptor = int(name)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISSOCK(status.st_mode) or status.st_ino in seen:
                continue  # a copy may have got the descriptor of the listing itself
            seen.add(status.st_ino)
            copy = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue  # closed since it was listed
        if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
            yield descriptor, copy
        else:
            copy.close()


def _sent(copy: socket.socket) -> Traffic:
    """Reads the traffic of a connection from the kernel. Raises OSError."""
    info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES:  # a kernel before 4.10
        return Traffic(acknowledged_bytes=0, busy_s=0.0)
    (acknowledged,), (busy_us,) = (
        _U64.unpack_from(info, _BYTES_ACKED_AT),
        _U64.unpack_from(info, _BUSY_TIME_AT),
    )
    return Traffic(acknowledged_bytes=acknowledged, busy_s=busy_us / 1e6)


def _remote(copy: socket.socket) -> Endpoint | None:
    try:
        host, port = copy.getpeername()[:2]
    except OSError:
        return None
    return host, port


def _is_same(descriptor: int, inode: int) -> bool:
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


_LIVE: Final[weakref.WeakSet[GroupSockets]] = weakref.WeakSet()
"""All groups' sockets in this process. A forked child closes its copies of them."""


def _let_go_in_child() -> None:
    """Closes a forked child's copies of the sockets. Otherwise, peers would not notice this rank's
    death until its DataLoader workers exit."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for sockets in _LIVE:
        sockets.let_go_in_child(null)
    os.close(null)


os.register_at_fork(after_in_child=_let_go_in_child)
