"""A link that a test can cut, as a network does: it drops connections, or delays their bytes in one
direction or in both."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Self

THERE, BACK = 0, 1
"""Directions: from the client to the target, and from the target to the client."""
_WAYS = ((THERE, BACK), (THERE,), (BACK,))


class _Connection:
    """Two sockets with a thread for each direction. The last thread closes both."""

    def __init__(
        self, ends: tuple[socket.socket, socket.socket], tap: Callable[[bytes], None]
    ) -> None:
        self._ends = ends
        self._tap = tap
        self._gates = (threading.Event(), threading.Event())
        self._lock = threading.Lock()
        self._running = 2
        self.open()
        for way in (THERE, BACK):
            threading.Thread(target=self._pass_on, args=(way,), daemon=True).start()

    @property
    def over(self) -> bool:
        return not self._running

    def hold(self, ways: Sequence[int]) -> None:
        """Delays the bytes that arrive from now on."""
        for way in ways:
            self._gates[way].clear()

    def open(self) -> None:
        for gate in self._gates:
            gate.set()

    def drop(self) -> None:
        """Ends the connection. Delayed bytes are lost."""
        with self._lock:
            if self._running:
                for end in self._ends:
                    with contextlib.suppress(OSError):  # closed by the other side
                        end.shutdown(socket.SHUT_RDWR)
        self.open()

    def _pass_on(self, way: int) -> None:
        source, sink = self._ends[way], self._ends[1 - way]
        with contextlib.suppress(OSError):  # closed by the other side, or dropped
            while data := source.recv(1 << 16):
                self._tap(data)
                self._gates[way].wait()
                sink.sendall(data)
        self.drop()
        with self._lock:
            self._running -= 1
            if not self._running:
                for end in self._ends:
                    end.close()


class Relay:
    """A link to `target` (host:port), which need not listen yet. Use it as a context manager. `tap`
    is called with the bytes that pass in both directions."""

    def __init__(self, target: str, *, tap: Callable[[bytes], None] = lambda data: None) -> None:
        self._tap = tap
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._connections: list[_Connection] = []
        self._held: Sequence[int] = ()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._all())

    def hold(self, ways: Sequence[int]) -> None:
        """Delays the bytes of all connections in these directions, including later connections,
        until `open`."""
        with self._lock:
            self._held = ways
        for connection in self._all():
            connection.hold(ways)

    def open(self) -> None:
        with self._lock:
            self._held = ()
        for connection in self._all():
            connection.open()

    def drop(self) -> int:
        """Ends all connections and returns their number. New ones are passed on."""
        connections = self._all()
        for connection in connections:
            connection.drop()
        return len(connections)

    def drop_some(self, chance: random.Random) -> None:
        """Ends about half of the connections. New ones are passed on."""
        for connection in self._some(chance):
            connection.drop()

    def cut_some(self, chance: random.Random) -> list[_Connection]:
        """Delays the bytes of about half of the connections from now on, in one direction or in
        both. Returns these connections, so that the caller can reopen them."""
        some = self._some(chance)
        for connection in some:
            connection.hold(chance.choice(_WAYS))
        return some

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.drop()

    def _all(self) -> list[_Connection]:
        with self._lock:
            self._connections = [each for each in self._connections if not each.over]
            return list(self._connections)

    def _some(self, chance: random.Random) -> list[_Connection]:
        there = self._all()
        return chance.sample(there, (len(there) + 1) // 2)

    def _accept(self) -> None:
        while True:
            try:
                incoming, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                outgoing = socket.create_connection(self._target)
            except OSError:
                incoming.close()
                continue
            for end in (incoming, outgoing):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                connection = _Connection((incoming, outgoing), self._tap)
                connection.hold(self._held)
                self._connections.append(connection)
