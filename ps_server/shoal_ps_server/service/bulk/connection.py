"""One bulk connection on the server's event loop: exchanges frames over a non-blocking socket
without copying payloads.

Over TCP, a received payload goes from the kernel directly into the memory of its upload, and a sent
payload from a partition's values directly into the kernel; asyncio's streams would copy both twice.
TLS uses the ssl module on the same socket. With shared memory, only frame headers and messages go
through the socket (shoal_common.bulk).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Final

from shoal_common.bulk.area import AREA_BYTES, SharedArea
from shoal_common.bulk.frames import (
    DATA_BYTES,
    HEAD_BYTES,
    Frame,
    Kind,
    head,
    malformed,
    parse_head,
)
from shoal_common.failpoints import failpoint

from shoal_ps_server.shard.payload import Upload
from shoal_ps_server.shard.reading import Reading

_LINGER_S: Final = 1.0
_MORE: Final = getattr(socket, "MSG_MORE", 0)


class Disconnected(Exception):
    """Raised if the peer has disconnected or stalled in the middle of a stream. No error can then
    be sent to it."""


class ServedConnection:
    """One bulk connection. May be used by only one task at a time. Methods raise Disconnected, and
    InvalidRequestError / STREAM_MALFORMED."""

    def __init__(self, connected: socket.socket, *, idle_limit: timedelta) -> None:
        """Takes ownership of the socket, which must be non-blocking. `idle_limit`: maximum silence
        of the peer in the middle of a stream."""
        self._loop = asyncio.get_running_loop()
        self._socket = connected
        self._idle_s = idle_limit.total_seconds()
        self._is_plain = not isinstance(connected, ssl.SSLSocket)
        self._area: SharedArea | None = None
        self._unread = 0
        """Bytes of the current payload that have not been read from the socket."""

    @property
    def descriptor(self) -> int:
        """File descriptor of the socket."""
        return self._socket.fileno()

    async def shake_hands(self, threads: Executor) -> None:
        """Performs the TLS handshake if TLS is enabled. The cryptography runs on `threads`, so that
        clients cannot block the event loop with it; only waiting for the peer happens on the
        loop."""
        if not isinstance(self._socket, ssl.SSLSocket):
            return
        while True:
            step = self._loop.run_in_executor(threads, self._socket.do_handshake)
            try:
                await asyncio.wait([step])
            except asyncio.CancelledError:
                # the socket will be closed, so wait until no thread is using it
                await asyncio.wait([step])
                raise
            try:
                step.result()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                await self._ready(writes=isinstance(error, ssl.SSLWantWriteError))
            except OSError as error:
                raise Disconnected(str(error) or type(error).__name__) from error
            else:
                return

    def share(self, area: SharedArea, descriptor: int) -> None:
        """Makes all payloads go through the shared memory `area`, and takes ownership of it. Sends
        the peer a READY frame with the `descriptor` of the memory. Must be called before the first
        frame."""
        self._area = area
        try:
            # cannot block: a new socket's buffer is empty
            socket.send_fds(self._socket, [head(Kind.READY, AREA_BYTES)], [descriptor])
        except OSError as error:
            raise Disconnected(str(error)) from error

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Raises Disconnected if the enclosed block takes longer than the idle limit."""
        try:
            async with asyncio.timeout(self._idle_s) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise Disconnected(
                f"the peer made no progress in a stream for {self._idle_s:g} s"
            ) from error

    # ------------------------------------------------------------------------------------ receiving

    async def next_frame(self) -> Frame | None:
        """Returns the header of the next frame; None if the peer has closed the connection."""
        # Lets other tasks run, even if an endless sequence of frames has already arrived.
        await asyncio.sleep(0)
        data = bytearray(HEAD_BYTES)
        received = await self._receive_some(memoryview(data))
        if not received:
            return None
        if received < HEAD_BYTES:
            async with self.in_time():
                await self.receive_into(memoryview(data)[received:])
        return parse_head(data)

    async def message(self, frame: Frame) -> bytes:
        """Receives and returns a frame's message. The frame's kind must have a message."""
        data = bytearray(frame.length)
        await self.receive_into(memoryview(data))
        return bytes(data)

    async def receive_into(
        self, target: memoryview, came: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Fills `target` from the socket. `came`: called with the number of bytes of each part that
        arrives."""
        while target.nbytes:
            received = await self._receive_some(target)
            if not received:
                raise Disconnected("the peer closed the connection in the middle of a frame")
            came(received)
            target = target[received:]

    def data(self, frame: Frame) -> Data:
        """Returns the payload of a DATA frame. It must be moved or skipped before the next frame is
        received."""
        self._unread = frame.length
        return Data(self, frame.length)

    async def move(self, upload: Upload) -> None:
        """Copies the current payload into its upload. Raises the errors of `Upload.room`; the
        payload can then still be skipped."""
        nbytes = self._unread
        room = upload.room(nbytes)
        if self._area is None:

            def came(received: int) -> None:
                self._unread -= received
                upload.came(received)

            await self.receive_into(room, came)
        else:
            self._unread = 0
            room[:] = self._area.next_filled(nbytes)
            await self._send_bytes(head(Kind.FREE))
            upload.came(nbytes)

    async def pass_over(self) -> None:
        """Discards the rest of the current payload, if any."""
        if not self._unread:
            return
        if self._area is None:
            await self.receive_into(memoryview(bytearray(self._unread)))
        else:
            self._area.next_filled(0)
            await self._send_bytes(head(Kind.FREE))
        self._unread = 0

    # -------------------------------------------------------------------------------------- sending

    async def send(self, kind: Kind, message: bytes = b"", *, more: bool = False) -> None:
        """Sends one frame. `more`: True if another frame follows immediately."""
        await self._send_bytes(head(kind, len(message)) + message, more=more)

    async def send_last(self, kind: Kind, message: bytes) -> None:
        """Sends the last frame before the connection is closed. Then reads and discards some of the
        peer's data: if a connection is closed while data is unread, TCP resets it and the peer may
        not receive the frame."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await self.send(kind, message)
                with suppress(OSError):  # the peer has closed it
                    self._socket.shutdown(socket.SHUT_WR)
                dropped = memoryview(bytearray(1 << 16))
                while await self._receive_some(dropped):
                    pass

    async def send_values(self, reading: Reading) -> None:
        """Sends the rest of `reading` as DATA frames. Raises the errors of `Reading.take`, but only
        between two frames."""
        while nbytes := min(reading.remaining, DATA_BYTES):
            async with self.in_time():
                if self._area is None:
                    reading.promise(nbytes)
                    await self._send_bytes(head(Kind.DATA, nbytes), more=True)
                    await self._send_live(reading, nbytes)
                else:
                    while self._area.is_full:
                        await self._wait_for_free(self._area)
                    data = reading.take(nbytes)
                    self._area.fill(data)
                    await self._send_bytes(head(Kind.DATA, data.nbytes))
            failpoint("pull.halfway")
            await asyncio.sleep(0)  # lets other tasks run

    async def settle(self) -> None:
        """Waits until the peer has read all pieces in shared memory, so that both sides agree on
        the next piece."""
        while self._area is not None and self._area.in_use:
            await self._wait_for_free(self._area)

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        self._socket.close()
        if self._area is not None:
            self._area.close()

    async def _wait_for_free(self, area: SharedArea) -> None:
        frame = await self.next_frame()
        if frame is None:
            raise Disconnected("the peer closed the connection in the middle of a pull")
        if frame.kind is not Kind.FREE or not area.freed():
            raise malformed(f"unexpected {frame.kind.name} frame; expected FREE")

    async def _send_live(self, reading: Reading, nbytes: int) -> None:
        """Sends `nbytes` of values directly from the partition's memory. If the values change while
        the socket is full, continues from a copy."""
        while nbytes:
            sent = await self._send_some_live(reading, nbytes)
            reading.take(sent)
            nbytes -= sent

    async def _send_some_live(self, reading: Reading, most: int) -> int:
        # Evaluated on each call, since the reading may have switched to a copy.
        return await self._perform(lambda: self._socket.send(reading.rest[:most]), writes=True)

    async def _send_bytes(self, data: bytes, *, more: bool = False) -> None:
        flags = _MORE if more and self._is_plain else 0
        rest = memoryview(data)
        while rest.nbytes:
            sent = await self._perform(partial(self._socket.send, rest, flags), writes=True)
            rest = rest[sent:]

    async def _receive_some(self, target: memoryview) -> int:
        return await self._perform(lambda: self._socket.recv_into(target), writes=False)

    async def _perform(self, operation: Callable[[], int | None], *, writes: bool) -> int:
        """Performs a socket operation; while it would block, waits and retries. Under TLS, a write
        may have to wait until the socket can be read, and a read until it can be written."""
        while True:
            try:
                return operation() or 0
            except ssl.SSLWantReadError:
                await self._ready(writes=False)
            except ssl.SSLWantWriteError:
                await self._ready(writes=True)
            except BlockingIOError:
                await self._ready(writes=writes)
            except OSError as error:  # includes ssl.SSLError
                raise Disconnected(str(error) or type(error).__name__) from error

    async def _ready(self, *, writes: bool) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        descriptor = self._socket.fileno()
        if descriptor < 0:
            raise Disconnected("this side has closed the connection")
        if writes:
            self._loop.add_writer(descriptor, _set, ready)
        else:
            self._loop.add_reader(descriptor, _set, ready)
        try:
            await ready
        finally:
            if writes:
                self._loop.remove_writer(descriptor)
            else:
                self._loop.remove_reader(descriptor)


class Data:
    """The next payload of a connection, still to be received. Implements `Chunk`."""

    def __init__(self, connection: ServedConnection, nbytes: int) -> None:
        self._connection = connection
        self.nbytes = nbytes

    async def move_to(self, upload: Upload) -> None:
        """Receives the payload directly into the upload's memory. Raises the errors of
        `ServedConnection.move`."""
        await self._connection.move(upload)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
