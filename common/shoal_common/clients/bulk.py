"""Client end of the bulk channel: opens connections with tickets, and chooses for each push or pull
between the bulk channel and gRPC.

Socket calls block, at most until the stream's deadline. Payloads are sent from the caller's buffers
and received directly into them; shared memory costs one copy on each side. If a stream succeeds or
the server refuses it, the connection is reused; after any other failure it is closed.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Final, TypeVar

from google.protobuf.message import DecodeError
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_common.bulk.area import SharedArea
from shoal_common.bulk.frames import (
    DATA_BYTES,
    HEAD_BYTES,
    Frame,
    Kind,
    greeting,
    head,
    malformed,
    parse_head,
)
from shoal_common.bulk.sockets import configure, connect, is_own_user, left_s
from shoal_common.bulk.transport import Transport
from shoal_common.clients.pull import PullReceiver
from shoal_common.errors import (
    CorruptDataError,
    DeadlineError,
    InvalidRequestError,
    LimitError,
    ShoalError,
    UnavailableError,
)
from shoal_common.formats.wire import as_bytes
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.rpc.status import from_error_message
from shoal_common.settings import parse_address

_log = logging.getLogger(__name__)

_CONNECT_S: Final = 3.0
"""Maximum time in seconds to connect, perform the TLS handshake and receive the server's first
response. If a firewall blocks the port, a call occasionally takes this much longer."""
_AGAIN_AFTER_S: Final = 60.0
"""Seconds before an unavailable transport is tried again."""
_MORE: Final = getattr(socket, "MSG_MORE", 0)

MessageT = TypeVar("MessageT", pb.PushResponse, pb.PullHeader)

OpenData = Callable[[str, str, timedelta], pb.OpenDataResponse]
"""Function that requests a ticket: (job, member, deadline) -> ticket."""


class OpenedConnection:
    """One connection of the bulk channel. Only one thread at a time may use it, but any thread may
    call `cut`."""

    def __init__(self, connected: socket.socket, address: str, member_id: str) -> None:
        """Takes ownership of `connected`. `address`: address of the server, for error messages."""
        self.member_id = member_id
        self.is_usable = True
        """True if a further stream can start on this connection."""
        self._socket = connected
        self._is_plain = not isinstance(connected, ssl.SSLSocket)
        self._address = address
        self._area: SharedArea | None = None
        self._until = 0.0
        """Deadline of the current stream, by the monotonic clock."""

    @classmethod
    def open(
        cls,
        transport: Transport,
        opened: pb.OpenDataResponse,
        settings: ChannelSettings,
        member_id: str,
        *,
        until: float,
    ) -> OpenedConnection:
        """Connects, sends the ticket, and waits for the server's response. Raises OSError, or the
        error that the server sends if it refuses the connection.

        `until`: deadline, by the monotonic clock.
        """
        until = min(until, time.monotonic() + _CONNECT_S)
        host = parse_address(settings.address).host
        connected = (
            socket.socket(socket.AF_UNIX)
            if transport is Transport.MEMORY
            else connect(host, opened.tcp_port, until)
        )
        try:
            if transport is Transport.MEMORY:
                connected.settimeout(left_s(until))
                connected.connect(f"\0{opened.memory_name}")
                if not is_own_user(connected):
                    raise ConnectionRefusedError(
                        "the socket belongs to another user's process; the ticket was not sent"
                    )
            configure(connected)
            if transport is Transport.TCP and settings.tls is not None:
                context = settings.tls.client_context()
                connected.settimeout(left_s(until))
                connected = context.wrap_socket(
                    connected, server_hostname=settings.server_name or host
                )
            connection = cls(connected, settings.address, member_id)
            connection._until = until
            connection._begin(opened.ticket, transport)
            return connection
        except BaseException as error:
            connected.close()
            if isinstance(error, _Lost):
                raise error.cause from None
            raise

    def upload(
        self, kind: Kind, partitions: Iterable[tuple[pb.PushHeader, memoryview]], until: float
    ) -> list[pb.PartitionResult]:
        """Uploads partitions and returns one result for each. `kind`: INITIALIZE or PUSH. Raises
        UnavailableError, DeadlineError, any error that the server sends, and any error raised while
        iterating over `partitions`."""
        with self._stream(kind.name.title(), until):
            self._send(head(kind), more=True)
            refusal: bytes | None = None
            try:
                refusal = self._send_partitions(partitions)
                self._send(head(Kind.END))
            except _Lost as lost:
                refusal = refusal or self._last_word()
                if refusal is None:
                    raise
                raise from_error_message(refusal) from lost
            return list(_decoded(pb.PushResponse, self._answer(refusal)).results)

    def pull(
        self, request: pb.PullRequest, receiver: PullReceiver, until: float
    ) -> list[pb.PullHeader]:
        """Receives the requested partitions into `receiver` and returns their headers. Raises the
        error sent by the server, UnavailableError, DeadlineError, and errors of `receiver`."""
        with self._stream("Pull", until):
            message = request.SerializeToString()
            self._send(head(Kind.PULL, len(message)), message)
            while True:
                frame = self._next_frame()
                if frame.kind is Kind.PARTITION:
                    receiver.begin(_decoded(pb.PullHeader, self._message(frame)))
                elif frame.kind is Kind.DATA:
                    self._receive_data(frame.length, receiver)
                elif frame.kind is Kind.END:
                    break
                elif frame.kind is Kind.ERROR:
                    raise _Refused(from_error_message(self._message(frame)))
                else:
                    raise malformed(f"unexpected {frame.kind.name} frame in the response to a pull")
        return receiver.finish()

    @property
    def is_alive(self) -> bool:
        """True unless the server has closed this idle connection."""
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        # between streams the server sends nothing, so the socket becomes readable only when the
        # connection is closed
        return not ready.poll(0)

    def cut(self) -> None:
        """Aborts the current stream. Idempotent."""
        with suppress(OSError):
            # SSLSocket's own method is not used, because a thread that is sending would continue
            # without TLS.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        self.is_usable = False
        self.cut()  # a forked child may have the socket too
        self._socket.close()
        if self._area is not None:
            self._area.close()

    # -------------------------------------------------------------------------------------- streams

    @contextmanager
    def _stream(self, method: str, until: float) -> Iterator[None]:
        """Context manager for one stream. Converts the errors of the connection to ShoalErrors.

        After the block, the connection can be reused only if the block succeeded or the server
        refused the stream."""
        self._until = until
        self.is_usable = False
        call = f"{method} at {self._address}"
        try:
            yield
            self.is_usable = True
        except _Refused as refused:
            self.is_usable = True
            raise refused.error from None
        except InvalidRequestError as error:
            if error.reason != "STREAM_MALFORMED":
                raise
            raise CorruptDataError(f"{call}: {error}", reason=error.reason) from error
        except _Lost as lost:
            if isinstance(lost.cause, TimeoutError):
                raise DeadlineError(f"{call}: Deadline Exceeded") from lost.cause
            raise UnavailableError(f"{call}: the bulk connection broke: {lost}") from lost.cause

    def _begin(self, ticket: bytes, transport: Transport) -> None:
        self._send(greeting(ticket))
        if transport is Transport.MEMORY:
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, HEAD_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
            frame = parse_head(data) if len(data) == HEAD_BYTES else None
            if frame is not None and frame.kind is Kind.READY and descriptors:
                self._area = SharedArea.received(descriptors[0], frame.length)
                return
            for descriptor in descriptors:
                os.close(descriptor)
            if frame is None:
                raise _Lost(
                    ConnectionError("the server closed the connection before it sent READY")
                )
        else:
            frame = self._next_frame()
        if frame.kind is Kind.ERROR:
            raise from_error_message(self._message(frame))
        if frame.kind is not Kind.READY or frame.length:
            raise malformed(f"unexpected {frame.kind.name} frame; expected an empty READY frame")

    def _send_partitions(
        self, partitions: Iterable[tuple[pb.PushHeader, memoryview]]
    ) -> bytes | None:
        """Sends partitions. If the server sends an ERROR frame in the meantime, stops and returns
        that frame's message."""
        for header, payload in partitions:
            message = header.SerializeToString()
            self._send(head(Kind.PARTITION, len(message)), message, more=True)
            data = as_bytes(payload)
            for start in range(0, data.nbytes, DATA_BYTES):
                if (refusal := self._send_data(data[start : start + DATA_BYTES])) is not None:
                    return refusal
        return None

    def _last_word(self) -> bytes | None:
        """Returns the message of the ERROR frame that the server sent before it closed the
        connection; None if it sent none."""
        with suppress(_Lost, InvalidRequestError):
            while (frame := self._frame_that_came()) is not None:
                if (refusal := self._refusal_or_free(frame)) is not None:
                    return refusal
        return None

    def _answer(self, refusal: bytes | None) -> bytes:
        """Waits for the server's response to an upload, and returns the encoded PushResponse.
        Raises _Refused if the server has refused the upload.

        `refusal`: message of an ERROR frame that arrived during the upload; None if there was
        none.
        """
        answer: bytes | None = None
        while answer is None and refusal is None:
            frame = self._next_frame()
            if frame.kind is Kind.RESULT:
                answer = self._message(frame)
            else:
                refusal = self._refusal_or_free(frame)
        while self._area is not None and self._area.in_use:
            self._refusal_or_free(self._next_frame())
        if answer is None:
            raise _Refused(from_error_message(refusal or b""))
        return answer

    def _refusal_or_free(self, frame: Frame) -> bytes | None:
        """Handles a frame that arrives during an upload. Returns the message of an ERROR frame.
        Returns None for a FREE frame, which frees a piece of shared memory."""
        if frame.kind is Kind.ERROR:
            return self._message(frame)
        if frame.kind is not Kind.FREE or self._area is None or not self._area.freed():
            raise malformed(f"unexpected {frame.kind.name} frame during an upload")
        return None

    # ---------------------------------------------------------------------------------------- bytes

    def _send_data(self, data: memoryview) -> bytes | None:
        """Sends one DATA frame. If the server has already sent an ERROR frame, returns that frame's
        message without sending."""
        while (frame := self._frame_that_came()) is not None or (
            self._area is not None and self._area.is_full
        ):
            refusal = self._refusal_or_free(self._next_frame() if frame is None else frame)
            if refusal is not None:
                return refusal
        if self._area is None:
            self._send(head(Kind.DATA, data.nbytes), data, more=True)
        else:
            self._area.fill(data)
            self._send(head(Kind.DATA, data.nbytes))
        return None

    def _frame_that_came(self) -> Frame | None:
        """Returns the next frame if its first byte has already arrived; otherwise None."""
        data = bytearray(HEAD_BYTES)
        try:
            self._socket.settimeout(0)
            received = self._socket.recv_into(data)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except OSError as error:
            raise _Lost(error) from error
        if not received:
            raise _Lost(ConnectionError("the server closed the connection"))
        self._receive_into(memoryview(data)[received:])
        return parse_head(data)

    def _receive_data(self, nbytes: int, receiver: PullReceiver) -> None:
        room = receiver.room(nbytes)
        if self._area is None:
            self._receive_into(memoryview(bytearray(nbytes)) if room is None else room)
        else:
            data = self._area.next_filled(nbytes)
            if room is not None:
                room[:] = data
            self._send(head(Kind.FREE))
        receiver.came(nbytes)

    def _next_frame(self) -> Frame:
        data = bytearray(HEAD_BYTES)
        self._receive_into(memoryview(data))
        return parse_head(data)

    def _message(self, frame: Frame) -> bytes:
        data = bytearray(frame.length)
        self._receive_into(memoryview(data))
        return bytes(data)

    def _receive_into(self, target: memoryview) -> None:
        while target.nbytes:
            with self._allowed():
                received = self._socket.recv_into(target)
            if not received:
                raise _Lost(ConnectionError("the server closed the connection"))
            target = target[received:]

    def _send(self, *parts: bytes | memoryview, more: bool = False) -> None:
        if not self._is_plain:
            for part in parts:
                with self._allowed():
                    self._socket.sendall(part)
            return
        rest = [memoryview(part) for part in parts if len(part)]
        while rest:
            with self._allowed():
                sent = self._socket.sendmsg(rest, (), _MORE if more else 0)
            while rest and sent >= rest[0].nbytes:
                sent -= rest.pop(0).nbytes
            if sent:
                rest[0] = rest[0][sent:]

    @contextmanager
    def _allowed(self) -> Iterator[None]:
        """Limits a socket call to the stream's remaining time. Converts its OSErrors to _Lost, to
        distinguish them from OSErrors raised by the code that produces payloads."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise _Lost(TimeoutError())
        try:
            self._socket.settimeout(left)
            yield
        except OSError as error:
            raise _Lost(error) from error


class BulkChannel:
    """All bulk connections of one client to one server. Thread-safe."""

    def __init__(
        self,
        settings: ChannelSettings,
        open_data: OpenData,
        *,
        transport: Transport,
        fell_back: Callable[[Transport], None],
    ) -> None:
        """`fell_back`: called with each transport that has failed unexpectedly, once a different
        transport is used instead."""
        self._settings = settings
        self._open_data = open_data
        self._transport = transport
        self._fell_back = fell_back
        self._not_before: dict[Transport, float] = {}
        """Unavailable transport -> time of the next attempt, by the monotonic clock."""
        self._idle: list[OpenedConnection] = []
        self._used: set[OpenedConnection] = set()
        self._closed = False
        self._lock = threading.Lock()
        """Guards all attributes above except the arguments of __init__."""

    @contextmanager
    def connection(
        self, job_id: str, member_id: str, until: float
    ) -> Iterator[OpenedConnection | None]:
        """Yields a connection for calls on behalf of `member_id`, or None if the caller should use
        gRPC instead. If `member_id` is empty, the connection can only be used to pull. `until`:
        deadline, by the monotonic clock.

        Raises:
            UnavailableError: CLIENT_CLOSED; or TRANSPORT_UNAVAILABLE if only one transport is
                allowed and it is unavailable.
            DeadlineError: the deadline passed while the connection was being opened.
            ShoalError: the request for a ticket (`open_data`) failed.
        """
        connection = self._take(member_id) or self._open(job_id, member_id, until)
        if connection is None:
            yield None
            return
        try:
            yield connection
        except UnavailableError as error:
            if self._closed:
                raise self._closed_error() from error
            raise
        finally:
            self._give_back(connection)

    def close(self) -> None:
        """Aborts current streams and closes all connections. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._used:
                connection.cut()
        for connection in idle:
            connection.close()

    def _take(self, member_id: str) -> OpenedConnection | None:
        while True:
            with self._lock:
                found = next((each for each in self._idle if each.member_id == member_id), None)
                if found is None:
                    return None
                self._idle.remove(found)
                self._used.add(found)
            if found.is_alive:
                return found
            found.is_usable = False
            self._give_back(found)

    def _give_back(self, connection: OpenedConnection) -> None:
        with self._lock:
            self._used.discard(connection)
            kept = connection.is_usable and not self._closed
            if kept:
                self._idle.append(connection)
        if not kept:
            connection.close()

    def _open(self, job_id: str, member_id: str, until: float) -> OpenedConnection | None:
        for transport in (Transport.MEMORY, Transport.TCP):
            if self._transport not in (
                Transport.AUTO,
                transport,
            ) or time.monotonic() < self._not_before.get(transport, 0.0):
                continue
            try:
                return self._opened(transport, job_id, member_id, until)
            except _Unsuitable as error:
                self._give_up(transport, error)
        if self._transport in (Transport.AUTO, Transport.GRPC):
            return None
        raise UnavailableError(
            f"cannot reach the parameter server at {self._settings.address} with "
            f"transport={self._transport}, the only transport allowed; see the log for the "
            "cause",
            reason="TRANSPORT_UNAVAILABLE",
        )

    def _opened(
        self, transport: Transport, job_id: str, member_id: str, until: float
    ) -> OpenedConnection:
        try:
            opened = self._open_data(
                job_id, member_id, min(timedelta(seconds=left_s(until)), self._settings.deadline)
            )
        except LimitError as error:
            raise _Unsuitable(str(error), expected=False) from error
        except ShoalError as error:
            if error.reason != "UNIMPLEMENTED":
                raise  # the same error as for a push or pull over gRPC
            raise _Unsuitable(
                "the server does not support the bulk channel", expected=False
            ) from error
        if transport is Transport.MEMORY and not opened.memory_name:
            raise _Unsuitable("the server does not offer shared memory", expected=True)
        try:
            connection = OpenedConnection.open(
                transport, opened, self._settings, member_id, until=until
            )
        except (OSError, ShoalError) as error:
            if time.monotonic() >= until:
                # the caller's deadline has passed, so it is unknown whether the transport works
                raise DeadlineError(
                    f"bulk connection to {self._settings.address}: Deadline Exceeded"
                ) from error
            elsewhere = transport is Transport.MEMORY and isinstance(error, ConnectionRefusedError)
            raise _Unsuitable(str(error) or type(error).__name__, expected=elsewhere) from error
        with self._lock:
            if not self._closed:
                self._used.add(connection)
                return connection
        connection.close()
        raise self._closed_error()

    def _give_up(self, transport: Transport, error: _Unsuitable) -> None:
        address = self._settings.address
        with self._lock:
            first = transport not in self._not_before
            self._not_before[transport] = time.monotonic() + _AGAIN_AFTER_S
        if error.expected and self._transport is Transport.AUTO:
            _log.debug("did not open a bulk channel over %s to %s: %s", transport, address, error)
            return
        _log.log(
            logging.WARNING if first else logging.DEBUG,
            "could not open a bulk channel over %s to the parameter server at %s: %s; fell back "
            "to the next transport",
            *(transport, address, error),
        )
        self._fell_back(transport)

    def _closed_error(self) -> UnavailableError:
        return UnavailableError(
            f"the client for {self._settings.address} was closed", reason="CLIENT_CLOSED"
        )


class _Unsuitable(Exception):
    """Raised if a transport is unavailable. `expected`: True if this is normal, such as shared
    memory with a server on a different machine."""

    def __init__(self, message: str, *, expected: bool) -> None:
        super().__init__(message)
        self.expected = expected


class _Lost(Exception):
    """Raised if the connection breaks or the stream's deadline passes."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause) or type(cause).__name__)
        self.cause = cause


class _Refused(Exception):
    """Raised if the server refuses the stream. The connection stays usable."""

    def __init__(self, error: ShoalError) -> None:
        super().__init__(str(error))
        self.error = error


def _decoded(message: type[MessageT], data: bytes) -> MessageT:
    try:
        decoded: MessageT = message.FromString(data)
        return decoded
    except DecodeError as error:
        raise CorruptDataError(
            f"cannot parse {len(data)} bytes as {message.DESCRIPTOR.name}: {error}; the data is "
            "truncated or of another type",
            reason="MESSAGE_MALFORMED",
        ) from error
