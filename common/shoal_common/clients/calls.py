"""What both clients share: a call with a deadline whose errors are ShoalErrors, and streams of answers likewise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Generic, Self, TypeVar

import grpc

from shoal_common.errors import UnavailableError
from shoal_common.rpc.channel import ChannelSettings, channel
from shoal_common.rpc.status import from_rpc_error

ResponseT = TypeVar("ResponseT")


class Caller:
    """One channel to one server, and the stub on it. Any thread may call; `close()` cancels what is in progress."""

    def __init__(self, settings: ChannelSettings, interceptors: Sequence[Any], stub: Callable[[grpc.Channel], Any]) -> None:
        self.channel = channel(settings, interceptors=interceptors)
        self._stub = stub(self.channel)
        self._settings = settings
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
        """One answer, of type `response`. `metadata`: of this call alone. DeadlineError after `deadline` (None: the settings')."""
        with self.errors(method):
            answer: ResponseT = getattr(self._stub, method)(request, timeout=self.seconds(deadline), metadata=metadata)
            return answer

    def stream(self, method: str, request: Any, response: type[ResponseT], deadline: timedelta | None) -> ResponseStream[ResponseT]:
        """Many answers; without a `deadline` the stream may stay open for ever, guarded by keepalive."""
        with self.errors(method):
            call = getattr(self._stub, method)(request, timeout=None if deadline is None else deadline.total_seconds())
        return ResponseStream(call, self, method)

    def seconds(self, deadline: timedelta | None) -> float:
        return (self._settings.deadline if deadline is None else deadline).total_seconds()

    @contextmanager
    def errors(self, method: str) -> Iterator[None]:
        """Turns gRPC's errors into ShoalErrors that say what was asked of whom."""
        call = f"{method} at {self._settings.address}"
        try:
            yield
        except (grpc.RpcError, ValueError) as error:
            # gRPC raises ValueError for calls begun on a closed channel, and cancels those in progress.
            if self._closed:
                raise UnavailableError(f"{call}: this client was closed", reason="CLIENT_CLOSED") from error
            if isinstance(error, grpc.RpcError):
                raise from_rpc_error(error, call=call) from error
            raise

    def close(self) -> None:
        self._closed = True
        self.channel.close()


class ResponseStream(Generic[ResponseT]):
    """The server's side of a streaming call: iterate it on one thread; `cancel()` from any thread ends the iteration without an error."""

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

    def cancel(self) -> None:
        """Ends the call. Idempotent."""
        self._cancelled = True
        self._call.cancel()
