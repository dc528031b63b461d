"""Sums a few numbers across all ranks of a group, over separate connections that the ranks'
training threads use directly.

Every rank waits for such a sum in each step, and the last rank to continue determines the duration.
Gloo's messages are read by one of Gloo's threads, which must be woken and then wakes the waiting
thread. If all cores are busy, both threads may have to wait for a core. Here, a rank's training
thread reads its messages itself (docs/explanation/backends.md#short-sums).

Every rank receives the numbers of all ranks and adds them in rank order, so all ranks get bitwise
the same result. In groups of up to four ranks, each rank sends its numbers to all others in one
round. With more ranks, there are ceil(log2(ranks)) rounds. In each round, the amount of numbers
that a rank has collected doubles. In round k, a rank sends all of them to rank (rank - 2^k) mod N,
and receives the same amount from rank (rank + 2^k) mod N. (Bruck et al. 1997, IEEE TPDS 8(11),
"Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems", section
3.)

Threads: one thread connects, one thread sums. Any thread may call `shut_down` and `close`; `close`
waits for a running sum.
"""

from __future__ import annotations

import contextlib
import operator
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import numpy as np
import torch
from shoal_common.errors import PreconditionError

MOST_BYTES: Final = 1 << 14
"""Maximum number of bytes that a rank receives in one sum. For larger sums, an all-reduce sends
less data."""

_FEW: Final = 4
"""Maximum number of ranks that send to all other ranks in one round: additional messages cost less
than a further round, because the training thread sleeps in each round."""
_HELLO: Final = struct.Struct("<16sI")
"""Format of the message that identifies a rank on a new connection: the door's token, and the
rank."""
_HEADER: Final = struct.Struct("<II")
"""Format of a message's header: number of the sum, counted from 1, and number of bytes that
follow."""


@dataclass(frozen=True, kw_only=True)
class Door:
    """Address where a rank listens for short sums, with a token that only ranks of the group
    know."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"{self.host} {self.port} {self.token}"

    @classmethod
    def parse(cls, text: str) -> Door:
        """Parses the text form of a door, as returned by `str`."""
        host, port, token = text.split(" ")
        return cls(host=host, port=int(port), token=token)


@dataclass(frozen=True, kw_only=True)
class _Swap:
    """Messages that a rank sends and receives in one round of a sum."""

    to: socket.socket
    to_rank: int
    source: socket.socket
    source_rank: int
    rows: int
    """Number of ranks whose numbers are sent, beginning with this rank; also the number of ranks
    whose numbers are received."""


class ShortSums:
    """Computes one rank's short sums with the other ranks of its group. `connect` must be called
    first, and `close` last. Sums must be issued in the same order on all ranks."""

    def __init__(self, host: str, rank: int, size: int) -> None:
        """Listens on `host`, a numeric address. Raises OSError."""
        self._rank, self._size = rank, size
        self._listener = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=64
        )
        self.door = Door(
            host=host, port=self._listener.getsockname()[1], token=secrets.token_hex(8)
        )
        self._rounds: list[list[_Swap]] = []
        self._sockets: list[socket.socket] = []
        """All connections, including unfinished ones. Only the connecting thread adds to the
        list."""
        self._given_up = False
        self._timeout_ms = 0
        self._number = 0
        self._summing = threading.Lock()
        """Held during a sum, so that no thread closes a socket that is being read; otherwise,
        another file could be opened under the same descriptor."""
        _LIVE.add(self)

    def connect(self, doors: Mapping[int, Door], *, deadline: float, timeout: timedelta) -> None:
        """Connects to the ranks that this rank exchanges messages with. `doors`: addresses of the
        ranks, by rank. `deadline`: time.monotonic() value at which the attempt ends. `timeout`:
        time limit of each later message.

        Raises OSError if a rank does not connect, or if `shut_down` is called.
        """
        self._timeout_ms = round(timeout.total_seconds() * 1000)
        few = self._size <= _FEW
        distances = (
            [*range(1, self._size)]
            if few
            else [1 << k for k in range((self._size - 1).bit_length())]
        )
        try:
            to = {
                distance: self._knock(doors[(self._rank - distance) % self._size], deadline)
                for distance in distances
            }
            sources = self._let_in(
                {(self._rank + distance) % self._size for distance in distances}, deadline
            )
        except OSError as error:
            if self._given_up:  # regardless of the error that the socket reports
                raise OSError("connecting to the other ranks was abandoned") from error
            raise
        for connection in [*to.values(), *sources.values()]:
            _wait_in_kernel(connection, timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for distance in distances:
            source = (self._rank + distance) % self._size
            rows = 1 if few else min(distance, self._size - distance)
            to_rank = (self._rank - distance) % self._size
            swap = _Swap(
                to=to[distance],
                to_rank=to_rank,
                source=sources[source],
                source_rank=source,
                rows=rows,
            )
            if few and self._rounds:
                self._rounds[0].append(swap)
            else:
                self._rounds.append([swap])
        self._listener.close()

    def takes(self, size: int) -> bool:
        """Returns whether a sum of `size` bytes per rank is short enough for this object."""
        return self._size * size <= MOST_BYTES

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums `tensor` across all ranks, in place. Blocks. `tensor` must be a contiguous CPU
        tensor of a dtype that numpy supports.

        Raises:
            OSError: a connection was closed, or a rank did not respond in time. No further sums are
                possible.
            PreconditionError: another rank issued a different sum (RANKS_DIVERGED). No further sums
                are possible.
        """
        mine = tensor.numpy().reshape(-1)
        numbers = np.frombuffer(self._gather(mine.tobytes()), mine.dtype)
        rows = [numbers[mine.size * rank : mine.size * (rank + 1)] for rank in range(self._size)]
        mine[:] = rows[-self._rank]
        for rank in range(1, self._size):
            mine += rows[rank - self._rank]

    def sum_numbers(self, values: array[float]) -> list[float]:
        """Returns the elementwise sums of an array of type "d" across all ranks. Raises the same
        errors as `all_reduce`."""
        numbers = array("d")
        numbers.frombytes(self._gather(values.tobytes()))
        rows = [
            numbers[len(values) * rank : len(values) * (rank + 1)] for rank in range(self._size)
        ]
        total = rows[-self._rank].tolist()
        for rank in range(1, self._size):
            total = list(map(operator.add, total, rows[rank - self._rank]))
        return total

    def _gather(self, mine: bytes) -> bytes:
        """Exchanges bytes with all ranks. Returns the bytes of all ranks in rank order, starting
        with this rank and wrapping around."""
        known, row = mine, len(mine)
        with self._summing:
            self._number += 1
            for round_ in self._rounds:
                for swap in round_:
                    size = swap.rows * row
                    try:
                        swap.to.sendall(_HEADER.pack(self._number, size) + known[:size])
                    except BlockingIOError:
                        raise self._late(swap.to_rank) from None
                for swap in round_:
                    known += self._receive(swap, swap.rows * row)
        return known

    def shut_down(self) -> None:
        """Shuts down the connections, so that waits on this rank and on the connected ranks end.
        Never blocks; idempotent."""
        self._given_up = True
        for connection in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):  # already broken, not yet connected, or closed
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends all sums as `shut_down` does, and closes the connections. Idempotent."""
        self.shut_down()
        with self._summing:
            self.close_copies()

    def close_copies(self) -> None:
        """Closes a forked child's copies of the sockets without affecting this rank's connections.
        Otherwise, the child would keep the connections open after this rank has died."""
        for connection in [self._listener, *self._sockets]:
            connection.close()

    def _knock(self, door: Door, deadline: float) -> socket.socket:
        connection = socket.socket(socket.AF_INET6 if ":" in door.host else socket.AF_INET)
        self._sockets.append(connection)
        self._check_wanted()
        connection.settimeout(_left(deadline))
        connection.connect((door.host, door.port))
        connection.sendall(_HELLO.pack(door.token.encode(), self._rank))
        return connection

    def _let_in(self, expected: set[int], deadline: float) -> dict[int, socket.socket]:
        """Accepts connections until all expected ranks have presented the token, and returns the
        connections by rank. Unrelated clients that connect, stay silent or disconnect do not delay
        any rank."""
        found: dict[int, socket.socket] = {}
        said: dict[socket.socket, bytes] = {}
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            while len(found) < len(expected):
                events = ready.select(_left(deadline))
                self._check_wanted()
                if not events and time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"ranks {sorted(expected - found.keys())} did not connect in time for "
                        "short all-reduces"
                    )
                for key, _ in events:
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    if connection is self._listener:
                        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                            # the client may already have disconnected
                            stranger, _ = self._listener.accept()
                            stranger.setblocking(False)
                            self._sockets.append(stranger)
                            said[stranger] = b""
                            ready.register(stranger, selectors.EVENT_READ)
                        continue
                    rank = self._who(connection, said)
                    if rank is not None:
                        ready.unregister(connection)
                        if rank in expected - found.keys():
                            found[rank] = connection
                        else:
                            connection.close()
        for stranger in set(said) - set(found.values()):
            stranger.close()
        return found

    def _who(self, connection: socket.socket, said: dict[socket.socket, bytes]) -> int | None:
        """Returns the rank that has identified itself on the connection; -1 for an unrelated client
        or a closed connection; None if it has not identified itself yet. `said`: bytes received so
        far, by connection."""
        try:
            more = connection.recv(_HELLO.size - len(said[connection]))
        except BlockingIOError:
            return None
        except OSError:
            return -1
        said[connection] += more
        if more and len(said[connection]) < _HELLO.size:
            return None
        if not more:
            return -1
        token, rank = _HELLO.unpack(said[connection])
        return int(rank) if secrets.compare_digest(token, self.door.token.encode()) else -1

    def _check_wanted(self) -> None:
        if self._given_up:
            raise ConnectionAbortedError("the group was abandoned")

    def _receive(self, swap: _Swap, size: int) -> bytes:
        message = b""
        try:
            while len(message) < _HEADER.size + size:
                more = swap.source.recv(_HEADER.size + size - len(message))
                if not more:
                    raise ConnectionResetError("a peer closed the connection")
                message += more
                if len(message) >= _HEADER.size:
                    self._check(swap, _HEADER.unpack_from(message), size)
        except BlockingIOError:  # the kernel enforces the socket's timeout: see _wait_in_kernel
            raise self._late(swap.source_rank) from None
        return message[_HEADER.size :]

    def _late(self, rank: int) -> TimeoutError:
        return TimeoutError(
            f"Timed out waiting {self._timeout_ms}ms for rank {rank}, or for a rank that it is "
            "waiting for"
        )

    def _check(self, swap: _Swap, header: tuple[int, int], size: int) -> None:
        if header != (self._number, size):
            raise PreconditionError(
                f"rank {swap.source_rank} sent {header[1]} bytes for sum {header[0]}, but this "
                f"rank expected {size} bytes for sum {self._number}: the ranks' scripts have "
                "diverged, or they train different models",
                reason="RANKS_DIVERGED",
            )


def _wait_in_kernel(connection: socket.socket, timeout: timedelta) -> None:
    """Sets the time limit of reads and writes of `connection`. They raise BlockingIOError when it
    expires. Python's own timeouts would poll before each read and write. If the script handles a
    signal in the meantime, the kernel restarts the time limit."""
    connection.settimeout(None)
    seconds, microseconds = divmod(max(1, round(timeout.total_seconds() * 1e6)), 10**6)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, microseconds))


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


_LIVE: Final[weakref.WeakSet[ShortSums]] = weakref.WeakSet()
"""All short sums of this process. A forked child closes its copies of their sockets."""


def _let_go_in_child() -> None:
    for sums in list(_LIVE):
        sums.close_copies()


os.register_at_fork(after_in_child=_let_go_in_child)
