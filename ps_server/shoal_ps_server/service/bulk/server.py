"""Server of the bulk channel: listens on a TCP port and a Unix socket, and serves uploads and pulls
of clients that have a ticket from OpenData.

The event loop reads and writes the sockets as well, because received data must be checked and
applied on it anyway, and a thread per connection was not faster
(docs/explanation/parameter-servers.md#transport). `Transfers` implements the streams, as it does
for gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import ssl
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from datetime import timedelta
from functools import partial
from typing import Final

from shoal_common.bulk.area import SharedArea, is_supported
from shoal_common.bulk.frames import GREETING_BYTES, Frame, Kind, malformed, ticket_of
from shoal_common.bulk.sockets import configure, is_own_user
from shoal_common.bulk.transport import Transport
from shoal_common.errors import (
    ConfigurationError,
    InvalidRequestError,
    PermissionDeniedError,
    ShoalError,
    UnavailableError,
)
from shoal_common.rpc.status import as_shoal_error, error_message
from shoal_common.security.authentication import TlsSettings
from shoal_common.settings import Address
from shoal_common.tasks import end_tasks
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.metrics import Metrics
from shoal_ps_server.service.bulk.connection import Disconnected, ServedConnection
from shoal_ps_server.service.bulk.hang_ups import HangUps
from shoal_ps_server.service.bulk.tickets import Speaker, Tickets
from shoal_ps_server.service.intake import IDLE_LIMIT
from shoal_ps_server.service.requests import UploadKind
from shoal_ps_server.service.streams import Arrived, Part
from shoal_ps_server.service.transfers import Transfers

logger = logging.getLogger(__name__)

_GREETING_LIMIT: Final = timedelta(seconds=5)
"""Maximum time for a new connection to complete the TLS handshake and present its ticket."""
_BACKLOG: Final = 128
_TURNED_AWAY_S: Final = 0.005
"""Delay in seconds after a connection has been rejected or has replaced an older one, so that such
connections cannot keep the event loop busy."""
_UPLOADS: Final = {Kind.INITIALIZE: UploadKind.INITIALIZE, Kind.PUSH: UploadKind.PUSH}
_MALFORMED: Final = "STREAM_MALFORMED"
_NOTHING: Final = Arrived(memoryview(b""))


class BulkServer:
    """The bulk channel of one server."""

    def __init__(
        self,
        *,
        tickets: Tickets,
        transfers: Transfers,
        metrics: Metrics,
        tls: TlsSettings | None,
        most_strangers: int,
        idle_limit: timedelta = IDLE_LIMIT,
    ) -> None:
        """`most_strangers`: maximum number of connections per transport that have not presented a
        ticket; a new one then replaces the oldest. `idle_limit`: maximum time that a peer may make
        no progress in an open stream."""
        self._tickets = tickets
        self._transfers = transfers
        self._metrics = metrics
        self._tls = tls
        self._most_strangers = most_strangers
        self._idle_limit = idle_limit
        self._hang_ups = HangUps()
        self._handshakes = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shoal-ps-tls")
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._serving: dict[asyncio.Task[None], bool] = {}
        """Task that serves a connection -> True if a stream is in progress."""
        self._strangers: dict[Transport, dict[asyncio.Task[None], None]] = {
            Transport.TCP: {},
            Transport.MEMORY: {},
        }
        """Connections that have not presented a ticket, oldest first. Anyone can connect over TCP,
        so local connections are counted separately."""
        self._draining = False
        self.port = 0
        """TCP port, set once the server listens."""
        self.memory_name = ""
        """Name of the Unix socket; empty if memory cannot be shared with clients."""

    def start(self, host: str, port: int) -> None:
        """Starts listening on host:port (0: any port) and on a Unix socket. Raises
        ConfigurationError."""
        context = None if self._tls is None else self._tls.server_context()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            both = host == "::" and socket.has_dualstack_ipv6()  # IPv4 as well, as gRPC does
            listener = socket.create_server(
                (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
            )
        except OSError as error:
            raise ConfigurationError(
                f"bulk_port={port}: cannot listen on {Address(host, port)}: {error}; free the "
                "port, or use 0 to get a free one"
            ) from error
        self.port = listener.getsockname()[1]
        self._accept_on(listener, Transport.TCP, context)
        if is_supported():
            self._share_memory()
        logger.info(
            "serving bulk connections", extra={"port": self.port, "memory": bool(self.memory_name)}
        )

    def _share_memory(self) -> None:
        name = f"shoal-ps-{secrets.token_hex(16)}"
        local = socket.socket(socket.AF_UNIX)
        try:
            # an abstract name leaves no file behind when the process is killed
            local.bind(f"\0{name}")
            local.listen(_BACKLOG)
        except OSError as error:  # e.g. forbidden by a sandbox: clients use TCP instead
            local.close()
            logger.warning(
                "could not share memory with clients on this machine", extra={"error": error}
            )
            return
        self.memory_name = name
        self._accept_on(local, Transport.MEMORY, None)  # its data never leaves the machine

    async def drain_and_stop(self, timeout: timedelta) -> None:
        """Rejects new connections and streams, waits up to `timeout` for open streams to end, then
        closes them. Idempotent."""
        self._draining = True
        await end_tasks(self._accepting)
        for listener in self._listeners:
            listener.close()
        for task, busy in list(self._serving.items()):
            if not busy:
                task.cancel()
        if self._serving:
            await asyncio.wait(self._serving, timeout=timeout.total_seconds())
        await end_tasks(list(self._serving))
        self._hang_ups.close()
        self._handshakes.shutdown(wait=False)

    # ----------------------------------------------------------------------------------- connecting

    def _accept_on(
        self, listener: socket.socket, transport: Transport, context: ssl.SSLContext | None
    ) -> None:
        listener.setblocking(False)
        self._listeners.append(listener)
        self._accepting.append(asyncio.create_task(self._accept(listener, transport, context)))

    async def _accept(
        self, listener: socket.socket, transport: Transport, context: ssl.SSLContext | None
    ) -> None:
        while True:
            await _someone_comes(listener)
            try:
                connected, _ = listener.accept()
                connected.setblocking(False)
            except BlockingIOError:  # the client has already disconnected
                continue
            except OSError as error:  # e.g. no file descriptors are left, which is temporary
                logger.warning("could not accept a bulk connection", extra={"error": error})
                await asyncio.sleep(0.1)
                continue
            if listener.family == socket.AF_UNIX and not is_own_user(connected):
                connected.close()
                await asyncio.sleep(_TURNED_AWAY_S)
                continue
            strangers = self._strangers[transport]
            is_crowded = len(strangers) >= self._most_strangers
            if is_crowded:
                oldest = next(iter(strangers))
                del strangers[oldest]
                oldest.cancel()
            task = asyncio.create_task(self._serve(connected, transport, context))
            self._serving[task] = False
            strangers[task] = None
            task.add_done_callback(partial(self._ended, connected))
            # Lets other tasks run, since a client that connects continuously would be accepted
            # without waiting.
            await asyncio.sleep(_TURNED_AWAY_S if is_crowded else 0)

    def _ended(self, connected: socket.socket, task: asyncio.Task[None]) -> None:
        connected.close()  # needed if the task was cancelled before it started
        self._serving.pop(task, None)
        self._is_known(task)

    def _is_known(self, task: asyncio.Task[None]) -> None:
        """Stops counting a connection as one that has not presented a ticket, because it has
        presented its ticket or has been closed."""
        for strangers in self._strangers.values():
            strangers.pop(task, None)

    async def _serve(
        self, connected: socket.socket, transport: Transport, context: ssl.SSLContext | None
    ) -> None:
        """Serves one connection until it is closed."""
        with contextlib.ExitStack() as stack:
            stack.callback(connected.close)
            try:
                configure(connected)
                if context is not None:
                    # the original object no longer owns the socket
                    connected = context.wrap_socket(
                        connected, server_side=True, do_handshake_on_connect=False
                    )
                connection = ServedConnection(connected, idle_limit=self._idle_limit)
                stack.callback(connection.close)
                speaker = await self._greeted(connection)
                stack.callback(self._tickets.closed, speaker.member_id)
                await self._make_ready(connection, transport)
                gauge = self._metrics.bulk_connections.labels(transport)
                gauge.inc()
                stack.callback(gauge.dec)
                await self._serve_streams(connection, speaker, transport)
            except (Disconnected, OSError) as error:
                logger.info(
                    "a bulk connection broke", extra={"transport": str(transport), "error": error}
                )
            except ShoalError as error:
                logger.info(
                    "closed a bulk connection because of an error",
                    extra={"transport": str(transport), "reason": error.reason, "error": error},
                )
            except Exception:
                logger.exception("a bulk connection failed")

    async def _greeted(self, connection: ServedConnection) -> Speaker:
        """Reads the ticket of a connection, and returns the member or anonymous reader that the
        ticket was issued to. From then on, the connection counts as open. Raises
        AuthenticationError if the ticket is invalid or missing."""
        async with asyncio.timeout(_GREETING_LIMIT.total_seconds()):
            await connection.shake_hands(self._handshakes)
            greeted = bytearray(GREETING_BYTES)
            await connection.receive_into(memoryview(greeted))
            ticket = ticket_of(bytes(greeted))
            try:
                if ticket is None:
                    raise malformed("a connection did not begin with a greeting")
                speaker = self._tickets.redeem(ticket, asyncio.get_running_loop().time())
            except ShoalError as error:
                await connection.send_last(Kind.ERROR, error_message(error))
                raise
        task = asyncio.current_task()
        assert task is not None, "it is served by a task"
        self._is_known(task)
        return speaker

    async def _make_ready(self, connection: ServedConnection, transport: Transport) -> None:
        if transport is not Transport.MEMORY:
            await connection.send(Kind.READY)
            return
        try:
            area, descriptor = SharedArea.make()
        except OSError as error:
            failure = UnavailableError(
                f"could not allocate shared memory: {error}", reason="MEMORY_EXHAUSTED"
            )
            await connection.send(Kind.ERROR, error_message(failure))
            raise failure from error
        try:
            connection.share(area, descriptor)
        finally:
            os.close(descriptor)

    # -------------------------------------------------------------------------------------- streams

    async def _serve_streams(
        self, connection: ServedConnection, speaker: Speaker, transport: Transport
    ) -> None:
        """Serves the streams of a connection, one after another, until the peer closes the
        connection or violates the protocol."""
        task = asyncio.current_task()
        assert task is not None, "it is served by a task"

        def gone() -> None:
            logger.info(
                "a bulk connection broke during a stream",
                extra={"transport": str(transport), "member_id": speaker.member_id},
            )
            task.cancel()

        try:
            while not self._draining and (frame := await connection.next_frame()) is not None:
                self._serving[task] = True
                with self._hang_ups.watched(connection.descriptor, gone):
                    await self._stream(connection, frame, speaker, transport)
                self._serving[task] = False
        except InvalidRequestError as error:
            # the client violated the protocol, so the following bytes cannot be interpreted
            await connection.send_last(Kind.ERROR, error_message(error))
            raise

    async def _stream(
        self, connection: ServedConnection, frame: Frame, speaker: Speaker, transport: Transport
    ) -> None:
        """Serves one stream. `frame`: the stream's first frame."""
        if frame.kind in _UPLOADS:
            await self._upload(connection, _UPLOADS[frame.kind], speaker, transport)
        elif frame.kind is Kind.PULL:
            await self._pull(connection, frame, speaker, transport)
        else:
            raise malformed(
                f"unexpected {frame.kind.name} frame; expected the beginning of a stream"
            )

    async def _upload(
        self, connection: ServedConnection, kind: UploadKind, speaker: Speaker, transport: Transport
    ) -> None:
        incoming = _Incoming(connection, speaker.member_id)
        try:
            response = await self._transfers.upload(
                incoming.parts(), kind, transport, key=speaker.key
            )
        except Disconnected:
            raise
        except Exception as error:
            failure = as_shoal_error(error, kind.value)
            if failure.reason == _MALFORMED:
                raise failure from error
            if failure.reason == "STREAM_IDLE":
                await connection.send_last(Kind.ERROR, error_message(failure))
                raise failure from error
            async with connection.in_time():
                await connection.send(Kind.ERROR, error_message(failure))
            await incoming.pass_over()
            return
        async with connection.in_time():
            await connection.send(Kind.RESULT, response.SerializeToString())

    async def _pull(
        self, connection: ServedConnection, frame: Frame, speaker: Speaker, transport: Transport
    ) -> None:
        async with connection.in_time():
            message = await connection.message(frame)
        try:
            request = pb.PullRequest.FromString(message)
            with self._metrics.counting_refusals("Pull"):
                _check_speaker(request.member_id, speaker.member_id)
            async with aclosing(
                self._transfers.pull(request, transport, key=speaker.key)
            ) as answers:
                async for header, reading in answers:
                    async with connection.in_time():
                        await connection.send(Kind.PARTITION, header.SerializeToString(), more=True)
                    if reading is not None:
                        await connection.send_values(reading)
            last, payload = Kind.END, b""
        except Disconnected:
            raise
        except Exception as error:
            refusal = as_shoal_error(error, "Pull")
            if refusal.reason == _MALFORMED:
                raise refusal from error
            last, payload = Kind.ERROR, error_message(refusal)
        async with connection.in_time():
            await connection.send(last, payload)
            await connection.settle()


class _Incoming:
    """An upload in progress over a connection."""

    def __init__(self, connection: ServedConnection, member_id: str) -> None:
        self._connection = connection
        self._member_id = member_id
        self._ended = False

    async def parts(self) -> AsyncGenerator[Part]:
        """Yields the parts of the upload up to END. Raises Disconnected, DecodeError,
        PermissionDeniedError, and InvalidRequestError / STREAM_MALFORMED."""
        while (frame := await self._next()) is not None:
            if frame.kind is Kind.DATA:
                yield None, self._connection.data(frame)
            else:
                header = pb.PushHeader.FromString(await self._connection.message(frame))
                if not self._member_id:
                    raise PermissionDeniedError(
                        "a bulk connection opened without a member_id may only pull"
                    )
                _check_speaker(header.member_id, self._member_id)
                yield header, _NOTHING

    async def pass_over(self) -> None:
        """Reads and discards the rest of a refused upload."""
        connection = self._connection
        async with connection.in_time():
            await connection.pass_over()
        while True:
            async with connection.in_time():
                frame = await self._next()
                if frame is None:
                    return
                if frame.kind is Kind.DATA:
                    connection.data(frame)
                    await connection.pass_over()
                else:
                    await connection.message(frame)

    async def _next(self) -> Frame | None:
        """Returns the header of the next DATA or PARTITION frame; None at the END of the upload."""
        if self._ended:
            return None
        frame = await self._connection.next_frame()
        if frame is None:
            raise Disconnected("the peer closed the connection in the middle of an upload")
        if frame.kind is Kind.END:
            self._ended = True
            return None
        if frame.kind not in (Kind.DATA, Kind.PARTITION):
            raise malformed(f"unexpected {frame.kind.name} frame in an upload")
        return frame


async def _someone_comes(listener: socket.socket) -> None:
    """Waits for a connection attempt without accepting it.

    asyncio's sock_accept also accepts the connection. If its task were cancelled at that moment,
    the connection would leak and the client would wait forever.
    """
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(listener, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(listener)


def _check_speaker(claimed: str, member_id: str) -> None:
    if claimed not in ("", member_id):
        raise PermissionDeniedError(
            f"member_id={claimed!r}: expected {member_id!r}, for which OpenData opened this bulk "
            "connection, or none"
        )
