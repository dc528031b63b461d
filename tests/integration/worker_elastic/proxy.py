"""A TCP proxy whose connections a test can drop, as a network or a load balancer does."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class Proxy:
    """Passes each connection on to `target`, host:port. A context manager."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._sockets = [self._listener]
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def connections(self) -> int:
        """How many are open."""
        with self._lock:
            return len(self._pairs)

    def drop(self) -> int:
        """Ends all connections; new ones are passed on. Returns how many there were."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):  # closed by the other side
                    end.shutdown(socket.SHUT_RDWR)
        return len(pairs)

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
            pair = (incoming, outgoing)
            with self._lock:
                self._pairs.add(pair)
                self._sockets += pair
            for source, sink in (pair, pair[::-1]):
                thread = threading.Thread(target=self._pass_on, args=(pair, source, sink))
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, pair: tuple[socket.socket, socket.socket], source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed by the other side
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with self._lock:
            self._pairs.discard(pair)
        for end in pair:
            with contextlib.suppress(OSError):  # closed by the other side
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self.drop()
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()
