"""Gives a committed state to peers over TCP, and takes one: staged whole, checksummed, and only then handed to the caller.

Plain sockets, because the same bytes over gRPC or Gloo take about twice as long on one host, and survivors stand still meanwhile.

A donor's `StateDonor` listens from the start of the session on a thread of its own. It answers only while an offer is open: the training
thread opens one, waits in a barrier until the receivers have what they need, and closes it; so nothing is applied to the tensors while
they are read. A receiver asks each donor for its part of the bytes, all donors at once. A request names the generation's nonce, so a peer
of another generation, or a stranger, is turned away.

Framing, all integers big-endian: request = magic, nonce (32 bytes), part, parts (u32 each). Answer = header length (u64), header (JSON:
structure, tensors, digest), its xxh3-64, then the part's bytes in blocks, each followed by its xxh3-64.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import xxhash
from shoal_common.errors import CorruptDataError, UnavailableError

from shoal_worker.failpoints import failpoint
from shoal_worker.state.digest import bytes_of, digest
from shoal_worker.state.tree import flatten, unflatten

_log = logging.getLogger(__name__)

_MAGIC = b"SHOALST1"
_REQUEST = struct.Struct("!8s32sII")
PROBE = bytes(_REQUEST.size)
"""A request for nothing, by one that only wants to know whether a donor can be reached: answered by closing the connection."""
_U64 = struct.Struct("!Q")
_BLOCK = 4 << 20
_LARGEST_HEADER = 256 << 20
_IO_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class _Offer:
    nonce: bytes
    header: bytes
    buffers: tuple[memoryview, ...]


class StateDonor:
    """Listens for peers that need this member's state."""

    def __init__(self, host: str) -> None:
        """Binds to `host` on a port that the system chooses."""
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._host = host
        self._offer: _Offer | None = None
        self._serving = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._accept, name="shoal-donor", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """host:port for peers."""
        return f"{self._host}:{self._listener.getsockname()[1]}"

    @contextlib.contextmanager
    def offering(self, state: object, nonce: str) -> Iterator[None]:
        """While open, peers that name `nonce` get `state`. The caller must not change the tensors in it meanwhile."""
        structure, tensors = flatten(state)
        on_cpu = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        header = _encode_header(structure, on_cpu)
        with self._changed:
            buffers = tuple(bytes_of(t) for t in on_cpu.values())
            self._offer = _Offer(nonce=nonce.encode(), header=header, buffers=buffers)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._offer = None
                # The tensors may change from here on: nobody may still read them.
                self._changed.wait_for(lambda: self._serving == 0, _IO_TIMEOUT_S)

    def close(self) -> None:
        """Stops listening."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), name="shoal-donate", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(_IO_TIMEOUT_S)
                magic, nonce, part, parts = _REQUEST.unpack(_receive(connection, _REQUEST.size))
                offer = self._enter(nonce) if magic == _MAGIC and 0 <= part < parts else None
                if offer is None:
                    return
                failpoint("transfer.before_serving")
                try:
                    _send_part(connection, offer, part, parts)
                finally:
                    self._exit()
            except (OSError, struct.error, CorruptDataError) as error:
                _log.warning("a peer that took state went away: %s", error)

    def _enter(self, nonce: bytes) -> _Offer | None:
        """Waits for the offer of `nonce`: a receiver may be quicker than the donor."""
        with self._changed:
            self._changed.wait_for(lambda: self._offer is not None and hmac.compare_digest(self._offer.nonce, nonce), _IO_TIMEOUT_S)
            if self._offer is None or not hmac.compare_digest(self._offer.nonce, nonce):
                return None
            self._serving += 1
            return self._offer

    def _exit(self) -> None:
        with self._changed:
            self._serving -= 1
            self._changed.notify_all()


def take_state(
    donors: Sequence[str], nonce: str, *, timeout: timedelta, guard: Callable[[socket.socket], None] = lambda connection: None
) -> tuple[Any, int]:
    """Fetches the state that the `donors` (host:port) offer under `nonce`; returns it and its size in bytes. Changes nothing here.

    `guard` gets each connection when it is made: whoever shuts it down ends the transfer.

    Raises:
        UnavailableError: a donor went away.
        CorruptDataError: a block's checksum is wrong.
    """
    failpoint("transfer.before_taking")
    deadline = time.monotonic() + timeout.total_seconds()
    parts = [_Part(address, nonce, i, len(donors), deadline, guard) for i, address in enumerate(donors)]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(parts), thread_name_prefix="shoal-take") as pool:
        for part in parts:
            stack.callback(part.close)
        headers = list(pool.map(_Part.open, parts))
        if any(h["digest"] != headers[0]["digest"] for h in headers):
            _log.error("donors of one state name hold different states (%s); taking it all from the first", [h["digest"] for h in headers])
            for part in parts:
                part.close()
            return take_state(donors[:1], nonce, timeout=timedelta(seconds=max(0.001, deadline - time.monotonic())), guard=guard)
        staged = {t["name"]: torch.empty(t["shape"], dtype=getattr(torch, t["dtype"])) for t in headers[0]["tensors"]}
        buffers = [bytes_of(t) for t in staged.values()]
        list(pool.map(lambda part: part.read_into(buffers), parts))
    return unflatten(headers[0]["structure"], staged), sum(b.nbytes for b in buffers)


class _Part:
    """One donor's share of a transfer."""

    def __init__(self, address: str, nonce: str, part: int, parts: int, deadline: float, guard: Callable[[socket.socket], None]) -> None:
        self._guard = guard
        self._address, self._nonce, self._part, self._parts, self._deadline = address, nonce, part, parts, deadline
        self._socket: socket.socket | None = None

    def open(self) -> dict[str, Any]:
        host, _, port = self._address.rpartition(":")
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=max(0.001, self._deadline - time.monotonic()))
            self._guard(self._socket)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(_REQUEST.pack(_MAGIC, self._nonce.encode(), self._part, self._parts))
            (length,) = _U64.unpack(_receive(self._socket, _U64.size))
            if length > _LARGEST_HEADER:
                raise CorruptDataError(f"donor {self._address} announced a header of {length} bytes; at most {_LARGEST_HEADER} are allowed")
            raw = _receive(self._socket, length)
            _check(raw, _receive(self._socket, _U64.size), self._address, "its header")
            header: dict[str, Any] = json.loads(raw)
            return header
        except (OSError, struct.error) as error:
            raise UnavailableError(f"donor {self._address} went away before it sent its state: {error}", reason="DONOR_LOST") from error

    def read_into(self, buffers: Sequence[memoryview]) -> None:
        assert self._socket is not None
        try:
            for block in _blocks(buffers, self._part, self._parts):
                self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
                _receive_into(self._socket, block)
                _check(block, _receive(self._socket, _U64.size), self._address, "a block")
        except (OSError, struct.error) as error:
            raise UnavailableError(f"donor {self._address} went away while it sent its state: {error}", reason="DONOR_LOST") from error

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _encode_header(structure: Any, tensors: dict[str, torch.Tensor]) -> bytes:
    described = [{"name": n, "dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)} for n, t in tensors.items()]
    return json.dumps({"structure": structure, "tensors": described, "digest": f"{digest(structure, tensors):016x}"}).encode()


def _send_part(connection: socket.socket, offer: _Offer, part: int, parts: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_U64.pack(len(offer.header)) + offer.header + _digest(offer.header))
    for block in _blocks(offer.buffers, part, parts):
        connection.sendall(block)
        connection.sendall(_digest(block))


def _blocks(buffers: Sequence[memoryview], part: int, parts: int) -> Iterator[memoryview]:
    """Every `parts`-th block of all buffers, from block `part` on: the same cut on both sides."""
    index = 0
    for buffer in buffers:
        for offset in range(0, buffer.nbytes, _BLOCK):
            if index % parts == part:
                yield buffer[offset : offset + _BLOCK]
            index += 1


def _digest(data: bytes | memoryview) -> bytes:
    return _U64.pack(xxhash.xxh3_64_intdigest(data))


def _check(data: bytes | bytearray | memoryview, checksum: bytes | bytearray, address: str, what: str) -> None:
    if _digest(memoryview(data)) != bytes(checksum):
        raise CorruptDataError(f"the state that donor {address} sent is damaged: the checksum of {what} is wrong", reason="STATE_DAMAGED")


def _receive(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    _receive_into(connection, memoryview(data))
    return data


def _receive_into(connection: socket.socket, target: memoryview) -> None:
    while target:
        received = connection.recv_into(target)
        if received == 0:
            raise ConnectionError("the connection ended")
        target = target[received:]
