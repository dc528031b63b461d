"""Detects deaths and determines the members, for the training loop with torch's `_reconfigure`,
which leaves both to its user.

A separate process, the watcher, has a TCP connection to every worker. When a worker dies, the
kernel closes its connection within milliseconds, which is faster than any heartbeat. The watcher
numbers the generations of members, and sends each new generation to all workers immediately. It
also hosts the store of torch's process group.

Messages are lines of JSON. The watcher sends {"store": port, "member": number} to a new worker, and
{"generation": number, "members": [...]} for each generation. A worker sends {"ready": true} once it
can train, and {"failed": generation} if it could not form a group of a generation's members.

The watcher needs torch for the store, but `Membership`, the workers' part, does not.
"""

from __future__ import annotations

import argparse
import json
import select
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any, Final

_HOST: Final = "127.0.0.1"
_READ: Final = 65536


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A numbered list of members that train together."""

    number: int
    members: tuple[int, ...]
    """Numbers of the members, in the order of their ranks."""


class Membership:
    """A worker's connection to the watcher, by which it becomes a member. Used by one thread."""

    def __init__(self, port: int, *, timeout_s: float) -> None:
        """Connects to the watcher at `port`. `timeout_s`: limit of each wait. Raises OSError if no
        process listens on the port."""
        self._socket = socket.create_connection((_HOST, port), timeout=timeout_s)
        self._timeout_s = timeout_s
        self._rest = b""
        self._newest: Generation | None = None
        self._welcome: dict[str, int] = {}
        deadline = time.monotonic() + timeout_s
        while not self._welcome:
            self._receive(deadline, "the watcher's welcome")

    @property
    def store_port(self) -> int:
        """Port of the store that the watcher hosts."""
        return self._welcome["store"]

    @property
    def member(self) -> int:
        """Number of this worker, which no other worker has."""
        return self._welcome["member"]

    def ready(self) -> None:
        """Asks the watcher to make this worker a member of the next generation."""
        self._send({"ready": True})

    def failed(self, generation: int) -> None:
        """Reports that the members of a generation could not form a group. If there is no newer
        generation, the watcher announces one."""
        self._send({"failed": generation})

    def newest(self, *, within_s: float = 0.0) -> Generation | None:
        """Returns the newest generation received so far. Waits for a message for at most
        `within_s`."""
        if select.select([self._socket], [], [], within_s)[0]:
            self._take()
        return self._newest

    def wait_for_newer(self, than: int, *, within_s: float | None = None) -> Generation:
        """Blocks until the watcher announces a generation with a number above `than`. Raises
        TimeoutError if it does not within `within_s` seconds; None: the timeout of this
        connection."""
        limit = self._timeout_s if within_s is None else within_s
        deadline = time.monotonic() + limit
        while self._newest is None or self._newest.number <= than:
            self._receive(deadline, f"a generation after {than}")
        return self._newest

    def close(self) -> None:
        """Ends the connection, as the death of the worker would."""
        self._socket.close()

    def _receive(self, deadline: float, what: str) -> None:
        if not select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"the watcher did not send {what} in time")
        self._take()

    def _take(self) -> None:
        data = self._socket.recv(_READ)
        if not data:
            raise ConnectionError("the watcher ended")
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "store" in message:
                self._welcome = message
            else:
                self._newest = Generation(
                    number=message["generation"], members=tuple(message["members"])
                )

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")


class Watcher:
    """The watcher's connections to all workers, and the current generation. Used by one thread."""

    def __init__(self, listener: socket.socket, *, store_port: int, ranks: int) -> None:
        """
        Args:
            listener: socket that accepts the workers' connections.
            store_port: port of the store, announced to the workers.
            ranks: number of members in the first generation.
        """
        self._store_port = store_port
        self._ranks = ranks
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._numbers: dict[socket.socket, int] = {}
        self._rests: dict[socket.socket, bytes] = {}
        self._connected = 0
        self._members: dict[int, socket.socket] = {}
        """Workers that are ready."""
        self._generation = 0

    def turn(self, timeout_s: float | None = None) -> None:
        """Waits for connections, messages and deaths, and handles them. If the list of members has
        changed, or the current generation has failed, announces a new generation. `timeout_s`:
        maximum wait; None: no limit."""
        before = tuple(self._members)
        failed = False
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._welcome()
            elif isinstance(key.fileobj, socket.socket):
                failed |= self._read(key.fileobj)
        changed = failed or tuple(self._members) != before
        if changed and (self._generation or len(self._members) == self._ranks):
            self._announce()

    def close(self) -> None:
        """Closes all connections."""
        for connection in list(self._numbers):
            self._forget(connection)
        self._selector.close()
        self._listener.close()

    def _welcome(self) -> None:
        connection, _ = self._listener.accept()
        self._numbers[connection] = self._connected
        self._rests[connection] = b""
        self._connected += 1
        self._selector.register(connection, selectors.EVENT_READ)
        self._send(connection, {"store": self._store_port, "member": self._numbers[connection]})

    def _read(self, connection: socket.socket) -> bool:
        """Handles messages from a worker, or its death. Returns whether the worker has reported
        that the current generation failed."""
        try:
            data = connection.recv(_READ)
        except ConnectionError:
            data = b""
        if not data:
            self._forget(connection)
            return False
        *lines, self._rests[connection] = (self._rests[connection] + data).split(b"\n")
        failed = False
        for message in map(json.loads, lines):
            if "ready" in message:
                self._members[self._numbers[connection]] = connection
            failed |= message.get("failed") == self._generation
        return failed

    def _announce(self) -> None:
        self._generation += 1
        members = sorted(self._members)
        for connection in list(self._members.values()):
            self._send(connection, {"generation": self._generation, "members": members})

    def _send(self, connection: socket.socket, message: dict[str, Any]) -> None:
        try:
            connection.sendall(json.dumps(message).encode() + b"\n")
        except ConnectionError:
            pass  # the worker died: its connection becomes readable, and is then forgotten

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._members.pop(self._numbers.pop(connection), None)
        del self._rests[connection]
        connection.close()


def listen(port: int) -> socket.socket:
    """Returns a listening socket for the workers' connections. `port`: port number; 0: any free
    port."""
    return socket.create_server((_HOST, port))


def main() -> None:
    """Runs the watcher."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--port", type=int, required=True)
    flags.add_argument("--ranks", type=int, required=True)
    options = flags.parse_args()
    listener = listen(options.port)
    import torch.distributed as dist  # workers may connect meanwhile

    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    watcher = Watcher(listener, store_port=store.port, ranks=options.ranks)
    while True:
        watcher.turn()


if __name__ == "__main__":
    main()
