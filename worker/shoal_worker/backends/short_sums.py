"""Sums of a few numbers over all ranks of a group, over connections of their own, from training thread to training thread.

At each step every rank waits for such a sum. What counts is how soon the last one goes on, and that is decided by threads: a message of
Gloo's is read by a thread of Gloo's, which has to be woken, and then wakes the one that waits. On cores that have other work both may have
to wait for one. Here a rank reads its messages itself (docs/decisions/0184).

Every rank gets all ranks' numbers and adds them up in the order of the ranks, so all have the same bits. What a rank knows doubles in each
of ceil(log2(ranks)) rounds: in round k it sends all it knows to the rank 2^k before it, and gets as much from the rank 2^k after it (Bruck
et al. 1997, IEEE TPDS 8(11), "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems", section 3).

Threads: one thread connects and sums; `shut_down` and `close` are for any.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import numpy as np
import torch
from shoal_common.errors import PreconditionError

MOST_BYTES: Final = 1 << 14
"""What a rank gets in one sum at the most. An all-reduce of more sends less than this would."""

_HELLO: Final = struct.Struct("<16sI")
"""The door's token, and who is there."""
_HEADER: Final = struct.Struct("<II")
"""How many sums there were, this one included, and how many bytes follow."""
_HELLO_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Door:
    """Where a rank is reached. Who knows the token is of the group."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"{self.host} {self.port} {self.token}"

    @classmethod
    def parse(cls, text: str) -> Door:
        """Of what `str` gave."""
        host, port, token = text.split(" ")
        return cls(host=host, port=int(port), token=token)


@dataclass(frozen=True, kw_only=True)
class _Round:
    to: socket.socket
    source: socket.socket
    source_rank: int
    known: int
    """The ranks whose numbers are here before it, this one and those after it."""
    several: int
    """How many go, and come."""


class ShortSums:
    """One rank's part in them. `connect` comes first, then sums, on all ranks in the same order; at last `close`."""

    def __init__(self, host: str, rank: int, size: int) -> None:
        """Listens on `host`, a numeric address."""
        self.door_token = secrets.token_hex(8)
        self._rank, self._size = rank, size
        self._listener: socket.socket | None = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=64
        )
        self.door = Door(host=host, port=self._listener.getsockname()[1], token=self.door_token)
        self._rounds: list[_Round] = []
        self._sockets: list[socket.socket] = []
        self._timeout_ms = 0
        self._number = 0
        _LIVE.add(self)

    def connect(self, doors: Mapping[int, Door], *, connect_timeout: timedelta, timeout: timedelta) -> None:
        """Connects to the ranks that it has to do with. `timeout`: of a message, later. Raises OSError when a rank does not come."""
        deadline = time.monotonic() + connect_timeout.total_seconds()
        self._timeout_ms = round(timeout.total_seconds() * 1000)
        distances = [1 << k for k in range((self._size - 1).bit_length())]
        to = {}
        for distance in distances:
            rank = (self._rank - distance) % self._size
            door = doors[rank]
            to[distance] = connection = socket.create_connection((door.host, door.port), timeout=_left(deadline))
            self._sockets.append(connection)
            connection.sendall(_HELLO.pack(door.token.encode(), self._rank))
        sources = self._let_in({(self._rank + distance) % self._size for distance in distances}, deadline)
        for connection in self._sockets:
            connection.settimeout(timeout.total_seconds())
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for distance in distances:
            source = (self._rank + distance) % self._size
            several = min(distance, self._size - distance)
            self._rounds.append(_Round(to=to[distance], source=sources[source], source_rank=source, known=distance, several=several))
        self._stop_listening()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums a contiguous tensor on the CPU, of a dtype that numpy has, in place. Blocks.

        Raises:
            OSError: a connection has ended, or a rank does not come; the sums of this group are over.
            PreconditionError: another rank sums something else: RANKS_DIVERGED.
        """
        self._number += 1
        mine = tensor.numpy().reshape(-1)
        rows = np.empty((self._size, mine.size), mine.dtype)  # row i is of the rank i after this one
        rows[0] = mine
        raw, row = rows.data.cast("B"), mine.nbytes
        for one in self._rounds:
            one.to.sendall(_HEADER.pack(self._number, one.several * row) + raw[: one.several * row])
            self._receive(one, raw[one.known * row : (one.known + one.several) * row])
        mine[:] = rows[-self._rank]
        for rank in range(1, self._size):
            mine += rows[rank - self._rank]

    def shut_down(self) -> None:
        """Ends what waits here, and at the ranks that are connected to this one. Never blocks; idempotent."""
        for connection in list(self._sockets):
            with contextlib.suppress(OSError):  # broken already, or closed
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets go of the connections. Idempotent."""
        self._stop_listening()
        for connection in list(self._sockets):
            connection.close()

    def _let_in(self, expected: set[int], deadline: float) -> dict[int, socket.socket]:
        listener = self._listener
        assert listener is not None
        found: dict[int, socket.socket] = {}
        while len(found) < len(expected):
            listener.settimeout(_left(deadline))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise TimeoutError(f"ranks {sorted(expected - found.keys())} did not connect for sums of a few numbers") from None
            with contextlib.suppress(OSError, struct.error):  # a stranger that went away, or says something else
                connection.settimeout(_HELLO_TIMEOUT_S)
                token, rank = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
                if secrets.compare_digest(token, self.door_token.encode()) and rank in expected - found.keys():
                    found[rank] = connection
                    self._sockets.append(connection)
                    continue
            connection.close()
        return found

    def _receive(self, one: _Round, into: memoryview) -> None:
        message = bytearray(_HEADER.size + len(into))
        rest = memoryview(message)
        try:
            while rest:
                received = one.source.recv_into(rest)
                if not received:
                    raise ConnectionResetError("the connection to a peer ended")
                rest = rest[received:]
                if len(message) - len(rest) >= _HEADER.size:
                    self._check(one, _HEADER.unpack_from(message), len(into))
        except TimeoutError:
            raise TimeoutError(f"Timed out waiting {self._timeout_ms}ms for rank {one.source_rank}") from None
        into[:] = message[_HEADER.size :]

    def _check(self, one: _Round, header: tuple[int, int], size: int) -> None:
        if header != (self._number, size):
            raise PreconditionError(
                f"rank {one.source_rank} sends {header[1]} bytes for sum {header[0]} where this rank expects {size} for sum "
                f"{self._number}: the ranks' scripts went different ways, or train different models",
                reason="RANKS_DIVERGED",
            )

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def let_go_in_child(self) -> None:
        """In a forked child: closes its copies, which would keep the connections open when this rank has died."""
        self.close()


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


_LIVE: Final[weakref.WeakSet[ShortSums]] = weakref.WeakSet()
"""Of this process, for its forked children."""


def _let_go_in_child() -> None:
    for sums in list(_LIVE):
        sums.let_go_in_child()


os.register_at_fork(after_in_child=_let_go_in_child)
