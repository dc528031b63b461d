"""Code shared by the clients of both services: calls and response streams that have deadlines and
raise ShoalErrors."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, Generic, Self, TypeVar

import grpc

from shoal_common.errors import UnavailableError
from shoal_common.rpc.channel import ChannelSettings, channel, is_name
from shoal_common.rpc.reach import Obstacle, find_obstacle
from shoal_common.rpc.status import from_rpc_error, is_unreachable

ResponseT = TypeVar("ResponseT")


_RENEW_EVERY_S: Final = 0.5


class Caller:
    """A channel to one server, and the stub of its service. Thread-safe; `close()` cancels calls in
    progress.

    If the server's address contains a host name (`is_name`) and a call does not reach the server,
    later calls use a new channel. Calls in progress stay on the old one.
    """

    def __init__(
        self,
        settings: ChannelSettings,
        interceptors: Sequence[Any],
        stub: Callable[[grpc.Channel], Any],
    ) -> None:
        """`stub`: creates the service's stub for a channel."""
        self._interceptors = interceptors
        self._make_stub = stub
        self._settings = settings
        self._renews = is_name(settings.address)
        self._lock = threading.Lock()
        self._channel = channel(settings, interceptors=interceptors)
        self._made_at = time.monotonic()
        self.stub = stub(self._channel)
        """The service's methods on the newest channel. Must be read again for each call, because
        the channel may change."""
        self._streams: weakref.WeakSet[ResponseStream[Any]] = weakref.WeakSet()
        """Open streams, possibly on earlier channels."""
        self._closed = False

    def unary(
        self,
        method: str,
        request: Any,
        response: type[ResponseT],
        deadline: timedelta | None,
        *,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> ResponseT:
        """Makes a call with one request and one response. Raises DeadlineError after the deadline.

        `deadline`: maximum duration; None: the default of the settings. `metadata`: entries for
        this call only.
        """
        with self.errors(method):
            answer: ResponseT = getattr(self.stub, method)(
                request, timeout=self.seconds(deadline), metadata=metadata
            )
            return answer

    def stream(
        self, method: str, request: Any, response: type[ResponseT], deadline: timedelta | None
    ) -> ResponseStream[ResponseT]:
        """Makes a call with a stream of responses. Without a `deadline`, the stream may stay open
        indefinitely; keepalive pings detect a lost server."""
        with self.errors(method):
            call = getattr(self.stub, method)(
                request, timeout=None if deadline is None else deadline.total_seconds()
            )
        stream: ResponseStream[ResponseT] = ResponseStream(call, self, method)
        with self._lock:
            self._streams.add(stream)
            closed = self._closed
        if closed:  # the client was closed before this call was registered
            call.cancel()
        return stream

    def find_obstacle(self) -> Obstacle | None:
        """Tries to reach the server. Returns the reason why it cannot be reached; None if it can.
        Blocks for a few seconds at most."""
        return find_obstacle(self._settings)

    def seconds(self, deadline: timedelta | None) -> float:
        return (self._settings.deadline if deadline is None else deadline).total_seconds()

    @contextmanager
    def errors(self, method: str) -> Iterator[None]:
        """Converts gRPC errors raised in the block to ShoalErrors that name the call and the
        server."""
        call = f"{method} at {self._settings.address}"
        try:
            yield
        except (grpc.RpcError, ValueError) as error:
            # For a closed channel, gRPC raises ValueError in new calls, and cancels calls in
            # progress.
            if self._closed:
                raise UnavailableError(
                    f"{call}: this client was closed", reason="CLIENT_CLOSED"
                ) from error
            if isinstance(error, grpc.RpcError):
                if is_unreachable(error):
                    self._renew()
                raise from_rpc_error(error, call=call) from error
            raise

    def _renew(self) -> None:
        with self._lock:
            if (
                self._renews
                and not self._closed
                and time.monotonic() - self._made_at >= _RENEW_EVERY_S
            ):
                self._channel = channel(self._settings, interceptors=self._interceptors)
                self._made_at = time.monotonic()
                self.stub = self._make_stub(self._channel)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        self._channel.close()
        for stream in streams:
            stream.end()


class ResponseStream(Generic[ResponseT]):
    """Responses of a streaming call. Must be iterated over by one thread. `cancel()` ends the
    iteration without an error and may be called from any thread."""

    def __init__(self, call: Any, caller: Caller, method: str) -> None:
        self._call = call
        self._caller = caller
        self._method = method
        self._cancelled = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ResponseT:
        with self._caller.errors(self._method):
            try:
                response: ResponseT = next(self._call)
            except grpc.RpcError:
                if self._cancelled:
                    raise StopIteration from None
                raise
            return response

    def end(self) -> None:
        """Aborts the call: the iterating thread raises a ShoalError."""
        self._call.cancel()

    def cancel(self) -> None:
        """Cancels the call: the iteration stops without an error. Idempotent."""
        self._cancelled = True
        self._call.cancel()
