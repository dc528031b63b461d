"""Sends a committed state to peers over TCP, and receives one. A receiver stages and verifies the
complete state before using any of it.

Uses plain sockets, because sending the same bytes over gRPC or Gloo takes about twice as long on
one host, and survivors wait for the transfer.

A donor is a rank that sends its state. Its `StateDonor` listens on a separate thread from the start
of the session. It serves requests only while an offer is open. The training thread opens an offer,
waits in a barrier until the receivers have what they need, and closes the offer, which closes the
remaining connections. The tensors are therefore not modified while they are read, and a hung
receiver delays no other rank. A receiver requests a different part of the bytes from each donor,
from all donors in parallel. A request contains the generation's nonce, so peers of a different
generation and unrelated clients are refused. Each block has a deadline. The whole transfer, which
may be large, has none: it continues as long as it makes progress.

The transfer uses TLS if the RPCs use it. The donor's key is derived from the secret that the
coordinator has sent to its peers (shoal_common.security.certificates), and the nonce is sent
encrypted.

Framing, with big-endian integers. Request: magic, nonce (32 bytes), part, parts (u32 each).
Response: header length (u64), header (JSON: structure, tensors, digest), its xxh3-64, then the
part's bytes in blocks, each followed by its xxh3-64.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final

import torch
import xxhash
from shoal_common.errors import CorruptDataError, InternalError, UnavailableError
from shoal_common.failpoints import failpoint
from shoal_common.security.certificates import PairContexts
from shoal_common.settings import Address
from shoal_common.system.own_address import REACHED_ELSEWHERE

from shoal_worker.backends.inmemory.turns import run_aside
from shoal_worker.elastic.group.group import Group
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.settings import WorkerSettings
from shoal_worker.state import device_reader
from shoal_worker.state.device_reader import DeviceReader, bytes_in
from shoal_worker.state.digest import digest, digest_in_place
from shoal_worker.state.tree import flatten, unflatten

# ------------------------------------------------------------------------------------- one transfer

_log = logging.getLogger(__name__)

_MAGIC = b"SHOALST1"
_REQUEST = struct.Struct("!32sII")
PROBE = bytes(len(_MAGIC))
"""Empty request that only tests whether a donor can be reached. The donor responds by closing the
connection."""
_U64 = struct.Struct("!Q")
_BLOCK = 4 << 20
_LARGEST_HEADER = 256 << 20
_BLOCK_TIMEOUT_S = 30.0
"""Maximum time for one block of 4 MiB. A transfer slower than 0.14 MB/s is therefore abandoned."""
_REQUEST_TIMEOUT_S = 5.0
"""Maximum time that a client may take to send its request, in seconds."""
_MOST_CONNECTIONS = 256
"""Maximum number of connections served at a time, each by a thread. Further connections wait in the
listener's queue."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


@dataclass(frozen=True, kw_only=True)
class _Offer:
    nonce: bytes
    header: bytes
    pieces: tuple[torch.Tensor, ...]
    """Bytes of each tensor, as a view of the tensor's memory, which may be on a device."""


class StateDonor:
    """Server that sends this member's state to peers."""

    def __init__(self, host: str, *, announced: str = "", secure: bool = False) -> None:
        """Binds to `host` on a port chosen by the system. `announced`: host that peers connect to,
        if it is not `host`. `secure`: True to require TLS from clients."""
        self.key = secrets.token_hex(16)
        """Secret shared with members of the job: the nonce of offers outside of a generation, and
        this donor's key for TLS."""
        self._tls = PairContexts.listener(self.key) if secure else None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
        self._host = announced or host
        self._offer: _Offer | None = None
        self._expected: bytes | None = None
        self._serving: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._thread = threading.Thread(target=self._accept, name="shoal-donor", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """host:port that peers connect to."""
        return str(Address(self._host, self._listener.getsockname()[1]))

    @property
    def is_secure(self) -> bool:
        """True if transfers use TLS."""
        return self._tls is not None

    def expect(self, nonce: str) -> None:
        """Lets only later requests with this `nonce` wait for an offer. All others are
        refused unless their offer is already open. Before the first call, any request may wait."""
        with self._changed:
            self._expected = nonce.encode()
            self._changed.notify_all()

    @contextlib.contextmanager
    def offering(self, state: object, nonce: str, without: Collection[str] = ()) -> Iterator[None]:
        """Offers `state`, within the block, to peers that send `nonce`. The caller must not change
        the state's tensors in the block. Transfers that are still incomplete at the end of the
        block are cut off. `without`: names of tensors that are not sent because the peers already
        have them."""
        structure, tensors = flatten(state)
        resolved = {
            name: t.resolve_conj().resolve_neg().contiguous()
            for name, t in tensors.items()
            if name not in without
        }
        header = _encode_header(structure, resolved, tensors.keys() - resolved.keys())
        for device in {t.device for t in resolved.values()}:
            if (lane := device_reader.lane_of(device)) is not None:
                lane.fence()()  # threads that serve peers must read finished values
        with self._changed:
            self._offer = _Offer(
                nonce=nonce.encode(),
                header=header,
                pieces=tuple(bytes_in(t) for t in resolved.values()),
            )
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._offer = None
                for connection in self._serving:
                    shut_down(connection)
                # The tensors may change from here on, so no thread may still read them.
                if not self._changed.wait_for(lambda: not self._serving, _BLOCK_TIMEOUT_S):
                    raise InternalError(
                        "a thread is still reading state to send to a peer, although the tensors "
                        "are about to be modified"
                    )

    def close(self) -> None:
        """Stops accepting connections from peers."""
        self._closed.set()
        with contextlib.suppress(OSError):  # the receiver has closed it
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        complained = False
        while not self._closed.is_set():
            if not self._free.acquire(timeout=0.5):
                continue
            try:
                connection, _ = self._listener.accept()
                threading.Thread(
                    target=self._serve, args=(connection,), name="shoal-donate", daemon=True
                ).start()
            except (OSError, RuntimeError) as error:
                # the listener was closed, or there are temporarily too few file descriptors or
                # threads
                self._free.release()
                if not self._closed.wait(0.1) and not complained:
                    complained = True
                    _log.warning("peers cannot currently receive state from this worker: %s", error)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with self._greeted(connection) as channel:
                nonce, part, parts = _read_request(channel)
                with self._entered(channel, nonce) as offer:
                    failpoint("transfer.before_serving")
                    channel.settimeout(_BLOCK_TIMEOUT_S)
                    _send_part(channel, offer, part, parts)
        except _Refused:
            pass  # an unrelated client, a probe, or a peer of an earlier generation
        except OSError as error:
            _log.warning("lost the connection to a peer that was receiving state: %s", error)
        except RuntimeError as error:
            _log.error(
                "a peer received no state from this worker, because the state could not be "
                "read from the device: %s",
                error,
            )
        finally:
            self._free.release()

    @contextlib.contextmanager
    def _greeted(self, connection: socket.socket) -> Iterator[socket.socket]:
        """Yields the socket for reading the peer's request, after the TLS handshake if TLS is
        required. Raises _Refused if the handshake fails."""
        if self._tls is None:
            with connection:
                yield connection
            return
        connection.settimeout(_REQUEST_TIMEOUT_S)
        try:
            channel = self._tls.wrap_socket(connection, server_side=True)
        except OSError as error:
            connection.close()
            raise _Refused from error
        with channel:
            yield channel

    @contextlib.contextmanager
    def _entered(self, connection: socket.socket, nonce: bytes) -> Iterator[_Offer]:
        """Yields the offer that was opened under `nonce`, and registers `connection` with it within
        the block. If there is no such offer yet but it is expected, waits for it, because a
        receiver may be faster than the donor.

        Raises:
            _Refused: there is no offer under `nonce`, and there will be none.
        """

        def decided() -> bool:
            unexpected = self._expected is not None and not hmac.compare_digest(
                self._expected, nonce
            )
            return self._offers(nonce) is not None or unexpected

        with self._changed:
            self._changed.wait_for(decided, _BLOCK_TIMEOUT_S)
            offer = self._offers(nonce)
            if offer is None:
                raise _Refused
            self._serving.add(connection)
        try:
            yield offer
        finally:
            with self._changed:
                self._serving.discard(connection)
                self._changed.notify_all()

    def _offers(self, nonce: bytes) -> _Offer | None:
        return (
            self._offer
            if self._offer is not None and hmac.compare_digest(self._offer.nonce, nonce)
            else None
        )


def shut_down(connection: socket.socket) -> None:
    """Shuts down a connection that another thread uses. SSLSocket's own method would let that
    thread continue in plain text."""
    with contextlib.suppress(OSError):  # its peer has closed it
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _Refused(Exception):
    """Raised to close a client's connection without a response."""


def _read_request(connection: socket.socket) -> tuple[bytes, int, int]:
    """Reads a request and returns (nonce, part, parts). Raises _Refused if the request is invalid
    or does not arrive in time."""
    deadline = time.monotonic() + _REQUEST_TIMEOUT_S
    try:
        if _receive(connection, len(_MAGIC), deadline) != _MAGIC:
            raise _Refused
        nonce, part, parts = _REQUEST.unpack(_receive(connection, _REQUEST.size, deadline))
    except OSError as error:
        raise _Refused from error
    if not part < parts:
        raise _Refused
    return nonce, part, parts


def take_state(
    donors: Sequence[str],
    nonce: str,
    *,
    timeout: timedelta,
    keys: Sequence[str] = (),
    guard: Callable[[socket.socket], None] = lambda connection: None,
    own: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> tuple[Any, int]:
    """Fetches the state that the `donors` (host:port) offer under `nonce`. Returns the state and
    the number of bytes received. Does not change this process's state. `own`: tensors that the
    donors do not send, because this process has them; keyed by name.

    `keys`: each donor's key (`StateDonor.key`), for TLS; empty: plain text. `guard`: called with
    each new connection, so that another thread can abort the transfer by shutting the connection
    down. `timeout`: time until all donors must have begun to respond; after that, each block has
    its own deadline.

    Raises:
        UnavailableError: a donor failed, or sends too slowly.
        CorruptDataError: a wrong checksum, or invalid data."""
    failpoint("transfer.before_request")
    deadline = time.monotonic() + timeout.total_seconds()
    parts = [
        _Part(address, nonce, i, len(donors), deadline, guard, key=keys[i] if keys else None)
        for i, address in enumerate(donors)
    ]
    with (
        contextlib.ExitStack() as stack,
        ThreadPoolExecutor(len(parts), thread_name_prefix="shoal-take") as pool,
    ):
        stack.callback(lambda: list(map(_Part.close, parts)))
        headers = list(pool.map(_Part.open, parts))
        alike = [number for number, each in enumerate(headers) if each.digest == headers[0].digest]
        if len(alike) < len(parts):
            if len(alike) < sum(each.digest[1] == headers[0].digest[1] for each in headers):
                _log.error(
                    "ranks that should have the same state offer different states (digests %s); "
                    "using the state of the first rank listed",
                    [h.digest[0] for h in headers],
                )
            stack.close()
            left, donors = (
                timedelta(seconds=max(0.001, deadline - time.monotonic())),
                [donors[number] for number in alike],
            )
            return take_state(
                donors,
                nonce,
                timeout=left,
                keys=[keys[number] for number in alike] if keys else (),
                guard=guard,
                own=own,
            )
        staged = {
            name: torch.empty(shape, dtype=dtype) for name, dtype, shape in headers[0].tensors
        }
        pieces = [bytes_in(t) for t in staged.values()]
        list(pool.map(lambda part: part.read_into(pieces), parts))
    return unflatten(headers[0].structure, {**own, **staged}), sum(piece.nbytes for piece in pieces)


class _Part:
    """One donor's part of a transferred state, which a thread receives."""

    def __init__(
        self,
        address: str,
        nonce: str,
        part: int,
        parts: int,
        deadline: float,
        guard: Callable[[socket.socket], None],
        *,
        key: str | None,
    ) -> None:
        self._guard = guard
        self._key = key
        self._address, self._nonce, self._part, self._parts, self._deadline = (
            address,
            nonce,
            part,
            parts,
            deadline,
        )
        self._socket: socket.socket | None = None

    def open(self) -> _Header:
        try:
            self._socket = self._connected()
            self._socket.sendall(
                _MAGIC + _REQUEST.pack(self._nonce.encode(), self._part, self._parts)
            )
            (length,) = _U64.unpack(_receive(self._socket, _U64.size, self._deadline))
            if length > _LARGEST_HEADER:
                raise CorruptDataError(
                    f"donor {self._address} announced a header of {length} bytes; expected at "
                    f"most {_LARGEST_HEADER}"
                )
            raw = _receive(self._socket, length, self._deadline)
            _check(
                raw, _receive(self._socket, _U64.size, self._deadline), self._address, "its header"
            )
        except OSError as error:
            raise UnavailableError(
                f"lost donor {self._address} before it sent its state: {error}",
                reason="DONOR_LOST",
            ) from error
        return _Header.parse(raw, self._address)

    def _connected(self) -> socket.socket:
        """Connects to the donor, with TLS if there is a key. Raises UnavailableError if the
        connection is refused, OSError on other failures, and ssl.SSLError (a subclass of OSError)
        if the donor does not have this key."""
        host, _, port = self._address.rpartition(":")
        try:
            connection = socket.create_connection(
                (host.strip("[]"), int(port)), timeout=max(0.001, self._deadline - time.monotonic())
            )
        except OSError as error:
            why = (
                f"donor {self._address} was lost or is unreachable from this machine: {error}; "
                f"{REACHED_ELSEWHERE}"
            )
            raise UnavailableError(why, reason="DONOR_LOST") from error
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._key is None:
            self._guard(connection)
            return connection
        channel = PairContexts.caller().wrap_socket(connection, do_handshake_on_connect=False)
        self._socket = channel
        self._guard(channel)
        channel.do_handshake()
        PairContexts.check(channel, self._key)
        return channel

    def read_into(self, pieces: Sequence[torch.Tensor]) -> None:
        assert self._socket is not None
        try:
            for piece in _blocks(pieces, self._part, self._parts):
                block = piece.numpy().data
                deadline = time.monotonic() + _BLOCK_TIMEOUT_S
                _receive_into(self._socket, block, deadline)
                _check(block, _receive(self._socket, _U64.size, deadline), self._address, "a block")
        except OSError as error:
            raise UnavailableError(
                f"lost donor {self._address} while it was sending its state: {error}",
                reason="DONOR_LOST",
            ) from error

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


@dataclass(frozen=True, kw_only=True)
class _Header:
    """Description of a transferred state, sent before its bytes."""

    structure: Any
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    """Name, dtype and shape of each tensor, in the order of transmission."""
    digest: tuple[str, str]
    """Digest of the state, and the devices of its tensors. A digest computed on a device differs
    from the digest of the same tensors computed on the host."""

    @classmethod
    def parse(cls, raw: bytes | bytearray, address: str) -> _Header:
        """Parses a header. Raises CorruptDataError if `raw` is not a valid header."""
        try:
            header = json.loads(raw)
            tensors = tuple(
                (str(t["name"]), _DTYPES[t["dtype"]], tuple(t["shape"])) for t in header["tensors"]
            )
            if any(type(n) is not int or n < 0 for _, _, shape in tensors for n in shape):
                raise ValueError("invalid shape")
            return cls(
                structure=header["structure"],
                tensors=tensors,
                digest=(str(header["digest"]), str(header["places"])),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptDataError(
                f"the data that donor {address} sent cannot be read as a state: {error!r}",
                reason="STATE_DAMAGED",
            ) from error


def _encode_header(
    structure: Any, tensors: Mapping[str, torch.Tensor], left_out: Collection[str] = ()
) -> bytes:
    described = [
        {"name": n, "dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
        for n, t in tensors.items()
    ]
    nothing = dict.fromkeys(left_out, torch.empty(0))
    digest_text = f"{digest(structure, {**tensors, **nothing}, digest_in_place):016x}"
    places = " ".join(t.device.type for t in tensors.values())
    return json.dumps(
        {"structure": structure, "tensors": described, "digest": digest_text, "places": places}
    ).encode()


def _send_part(connection: socket.socket, offer: _Offer, part: int, parts: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_U64.pack(len(offer.header)) + offer.header + _digest(offer.header))
    for device, blocks in itertools.groupby(
        _blocks(offer.pieces, part, parts), key=lambda block: block.device
    ):
        lane = device_reader.lane_of(device)
        for block in (
            blocks if lane is None else DeviceReader(lane, block_bytes=_BLOCK).blocks(blocks)
        ):
            here = block.numpy().data
            connection.sendall(here)
            connection.sendall(_digest(here))


def _blocks(pieces: Sequence[torch.Tensor], part: int, parts: int) -> Iterator[torch.Tensor]:
    """Yields every `parts`-th block of all pieces, beginning with block `part`. Sender and receiver
    both use it, so they divide the bytes into the same blocks."""
    index = 0
    for piece in pieces:
        for offset in range(0, len(piece), _BLOCK):
            if index % parts == part:
                yield piece[offset : offset + _BLOCK]
            index += 1


def _digest(data: bytes | memoryview) -> bytes:
    return _U64.pack(xxhash.xxh3_64_intdigest(data))


def _check(
    data: bytes | bytearray | memoryview, checksum: bytes | bytearray, address: str, what: str
) -> None:
    if _digest(memoryview(data)) != bytes(checksum):
        raise CorruptDataError(
            f"the state that donor {address} sent is damaged: the checksum of {what} is wrong",
            reason="STATE_DAMAGED",
        )


def _receive(connection: socket.socket, length: int, deadline: float) -> bytearray:
    data = bytearray(length)
    _receive_into(connection, memoryview(data), deadline)
    return data


def _receive_into(connection: socket.socket, target: memoryview, deadline: float) -> None:
    """Fills `target` from the connection. Raises OSError if the connection is closed or `deadline`
    (a value of time.monotonic()) passes before `target` is full."""
    while target:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        received = connection.recv_into(target)
        if received == 0:
            raise ConnectionError("the peer closed the connection")
        target = target[received:]


# --------------------------------------------------------------------- between the ranks of a group

MOST_DONORS: Final = 16
"""Maximum number of donors used by one receiver. More donors do not increase the throughput, and
each needs a thread, a connection and a description of the entire state."""


class StateExchange:
    """Sends and receives this rank's part of state transfers between the ranks of a group.

    A transfer ends with an exchange on the group, so that no rank changes its tensors while another
    reads them. The donor's threads serve the bytes (`StateDonor`). The training thread calls all
    methods."""

    def __init__(self, donor: StateDonor, settings: WorkerSettings, metrics: WorkerMetrics) -> None:
        self._donor = donor
        self._settings = settings
        self._metrics = metrics

    def expect(self, group: Group) -> None:
        """Accepts requests for state only from peers of `group` from now on."""
        self._donor.expect(group.generation.nonce)

    def give(
        self,
        group: Group,
        captured: object,
        *,
        until: Callable[[], object],
        without: Collection[str] = (),
    ) -> None:
        """Offers the state `captured` to the group's ranks while `until` runs. `until`: function
        that waits for the receivers. `without`: names of tensors that are not sent because the
        receivers already have them.

        Raises:
            MembershipChanged: the group has ended.
        """
        with self._donor.offering(captured, group.generation.nonce, without):
            until()

    def take(
        self,
        group: Group,
        donors: Sequence[int],
        own: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> Any:
        """Fetches the state from the ranks `donors` and returns it. Does not change this process's
        state. `own`: tensors that the donors do not send, because this process has them; keyed by
        name.

        Raises:
            UnavailableError: a donor failed, or damaged data arrived. The peers' state is intact,
                so the call can be retried.
            MembershipChanged: the group has ended."""
        started = time.monotonic()
        asked = share_of(donors, receiver=group.rank)
        peers = group.generation.peers_of(asked)
        addresses = [peer.donor_address for peer in peers]
        keys = [peer.donor_key for peer in peers] if self._settings.calling_tls is not None else []
        try:
            with group.guarding() as guard:
                # Run on another thread, because if ranks take turns, the donor may need its turn to
                # offer the state that this rank is waiting for.
                state, size = run_aside(
                    lambda: take_state(
                        addresses,
                        group.generation.nonce,
                        timeout=self._settings.collective_timeout,
                        keys=keys,
                        guard=guard,
                        own=own,
                    ),
                    f"for the state of ranks {list(asked)}",
                )
        except CorruptDataError as damage:
            raise UnavailableError(str(damage), reason=damage.reason) from damage
        except UnavailableError as lost:
            whose = ", ".join(
                f"{peer.donor_address} is rank {peer.rank} on {peer.host}" for peer in peers
            )
            raise UnavailableError(f"{lost} ({whose})", reason=lost.reason) from lost
        self._metrics.transferred(size, elapsed := time.monotonic() - started)
        _log.info(
            "received %.1f MB of state from %d donor(s) in %.3f s", size / 1e6, len(asked), elapsed
        )
        return state

    def close(self) -> None:
        """Stops offering state."""
        self._donor.close()


def share_of(donors: Sequence[int], *, receiver: int) -> Sequence[int]:
    """Returns the donors that `receiver` fetches from: at most MOST_DONORS, chosen so that
    different receivers use different donors where possible."""
    first = receiver * MOST_DONORS % len(donors)
    return (*donors[first:], *donors[:first])[:MOST_DONORS]
