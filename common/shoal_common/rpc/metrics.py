"""Metrics of gRPC calls, on servers and in clients, with the grpc-ecosystem's names, so that existing dashboards and alerts fit.

Server: grpc_server_started_total, grpc_server_handled_total, grpc_server_msg_received_total, grpc_server_msg_sent_total,
grpc_server_handling_seconds. Client: the same with grpc_client_, without the message counts. Labels grpc_type, grpc_service,
grpc_method, and grpc_code spelled as in Go ("OK", "InvalidArgument"). Messages that a handler moves through its context
(context.read, context.write) are not counted. Only methods that exist are counted, so strangers cannot make new label values.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, Counter, Histogram

from shoal_common.rpc.handlers import behaviour_of, with_behaviour

_CALL_LABELS: Final = ("grpc_type", "grpc_service", "grpc_method")
_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TYPES: Final = {
    (False, False): "unary",
    (True, False): "client_stream",
    (False, True): "server_stream",
    (True, True): "bidi_stream",
}
_GO_SPELLINGS: Final = {grpc.StatusCode.OK: "OK", grpc.StatusCode.CANCELLED: "Canceled"}
_GO_CODES: Final[Mapping[int | None, str]] = {
    code.value[0]: _GO_SPELLINGS.get(code, code.name.title().replace("_", "")) for code in grpc.StatusCode
}


@dataclass(frozen=True)
class _Call:
    """One method's metrics, with its labels bound."""

    started: Counter
    handled: Callable[[str], Counter]
    received: Counter
    sent: Counter
    seconds: Histogram


class ServerMetricsInterceptor(grpc.aio.ServerInterceptor):
    """Outermost on a server, so that it sees the statuses that others give. One per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"grpc_server_{name}", text, (*_CALL_LABELS, *more), registry=registry)

        self._started = counter("started", "RPCs begun on the server.")
        self._handled = counter("handled", "RPCs completed on the server, by status code.", "grpc_code")
        self._received = counter("msg_received", "Messages received by the server.")
        self._sent = counter("msg_sent", "Messages sent by the server.")
        self._seconds = Histogram(
            "grpc_server_handling_seconds",
            "Time from an RPC's start to its end on the server, in seconds.",
            _CALL_LABELS,
            registry=registry,
            buckets=_BUCKETS_S,
        )
        self._calls: dict[tuple[str, bool, bool], _Call] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return _counted(handler, self._call(handler_call_details.method, handler))

    def _call(self, method: str, handler: grpc.RpcMethodHandler) -> _Call:
        kind = (bool(handler.request_streaming), bool(handler.response_streaming))
        key = (method, *kind)
        if key not in self._calls:
            labels = (_TYPES[kind], *split_method(method))
            self._calls[key] = _Call(
                started=self._started.labels(*labels),
                handled=lambda code: self._handled.labels(*labels, code),
                received=self._received.labels(*labels),
                sent=self._sent.labels(*labels),
                seconds=self._seconds.labels(*labels),
            )
        return self._calls[key]


def _counted(handler: grpc.RpcMethodHandler, call: _Call) -> grpc.RpcMethodHandler:
    behaviour = behaviour_of(handler)

    def begin(request: Any) -> tuple[Any, float]:
        call.started.inc()
        if handler.request_streaming:
            return _counting(request, call.received), time.perf_counter()
        call.received.inc()
        return request, time.perf_counter()

    def end(code: str, start: float) -> None:
        call.handled(code).inc()
        call.seconds.observe(time.perf_counter() - start)

    if inspect.isasyncgenfunction(behaviour):

        async def streamed(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            request, start = begin(request)
            code = "OK"
            try:
                async with aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        call.sent.inc()
                        yield response
            except BaseException as error:
                code = _code_of(error, context)
                raise
            finally:
                end(code, start)

        return with_behaviour(handler, streamed)

    async def answered(request: Any, context: grpc.aio.ServicerContext) -> Any:
        request, start = begin(request)
        code = "OK"
        try:
            response = await behaviour(request, context)
            if not handler.response_streaming:
                call.sent.inc()
            return response
        except BaseException as error:
            code = _code_of(error, context)
            raise
        finally:
            end(code, start)

    return with_behaviour(handler, answered)


async def _counting(messages: AsyncIterator[Any], counter: Counter) -> AsyncIterator[Any]:
    async for message in messages:
        counter.inc()
        yield message


def _code_of(error: BaseException, context: grpc.aio.ServicerContext) -> str:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return go_code(grpc.StatusCode.CANCELLED)
    if isinstance(error, grpc.aio.AbortError):
        return go_code(context.code())
    return go_code(grpc.StatusCode.UNKNOWN)


class ClientMetricsInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """For synchronous channels: `channel(settings, interceptors=[ClientMetricsInterceptor(registry)])`.

    One per registry; a process's channels share it. Any thread may call.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._started = Counter("grpc_client_started", "RPCs begun by the client.", _CALL_LABELS, registry=registry)
        self._handled = Counter(
            "grpc_client_handled", "RPCs completed by the client, by status code.", (*_CALL_LABELS, "grpc_code"), registry=registry
        )
        self._seconds = Histogram(
            "grpc_client_handling_seconds",
            "Time from an RPC's start to its end as the client sees it, in seconds.",
            _CALL_LABELS,
            registry=registry,
            buckets=_BUCKETS_S,
        )

    def _observed(self, kind: str, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request: Any) -> Any:
        labels = (kind, *split_method(details.method))
        self._started.labels(*labels).inc()
        start = time.perf_counter()
        call = continuation(details, request)

        def ended(done: Any) -> None:
            self._handled.labels(*labels, go_code(done.code())).inc()
            self._seconds.labels(*labels).observe(time.perf_counter() - start)

        call.add_done_callback(ended)
        return call

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request: Any) -> Any:
        return self._observed("unary", continuation, details, request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request: Any) -> Any:
        return self._observed("server_stream", continuation, details, request)

    def intercept_stream_unary(self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request_iterator: Any) -> Any:
        return self._observed("client_stream", continuation, details, request_iterator)

    def intercept_stream_stream(self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request_iterator: Any) -> Any:
        return self._observed("bidi_stream", continuation, details, request_iterator)


def split_method(method: str) -> tuple[str, str]:
    """("shoal.v1.Coordinator", "GetJob") of "/shoal.v1.Coordinator/GetJob"."""
    service, _, name = method.removeprefix("/").partition("/")
    return service, name


def go_code(code: grpc.StatusCode | int | None) -> str:
    """A status code in Go's spelling. grpc.aio's contexts give numbers."""
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return _GO_CODES.get(number, "Unknown")
