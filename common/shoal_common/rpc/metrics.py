"""Metrics of gRPC calls, on servers and in clients, named as in grpc-ecosystem, so that existing
dashboards and alerts work.

Server: grpc_server_started_total, grpc_server_handled_total, grpc_server_msg_received_total,
grpc_server_msg_sent_total, grpc_server_handling_seconds. Client: the same names with the prefix
grpc_client_, without the message counts. Labels: grpc_type, grpc_service, grpc_method, and
grpc_code, spelled as in Go ("OK", "InvalidArgument"). Messages that a handler exchanges through its
context (context.read, context.write) are not counted. Only existing methods are counted, so that
callers without access cannot create new label values. server_interceptor.py does the counting on
servers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram

_CALL_LABELS: Final = ("grpc_type", "grpc_service", "grpc_method")
_BUCKETS_S: Final = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
_TYPES: Final = {
    (False, False): "unary",
    (True, False): "client_stream",
    (False, True): "server_stream",
    (True, True): "bidi_stream",
}
_GO_SPELLINGS: Final = {grpc.StatusCode.OK: "OK", grpc.StatusCode.CANCELLED: "Canceled"}
_GO_CODES: Final[Mapping[int | None, str]] = {
    code.value[0]: _GO_SPELLINGS.get(code, code.name.title().replace("_", ""))
    for code in grpc.StatusCode
}


class ServerMetrics:
    """Metrics of a server's calls. At most one object may be created per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"grpc_server_{name}", text, (*_CALL_LABELS, *more), registry=registry)

        self._started = counter("started", "RPCs started on the server.")
        self._handled = counter(
            "handled", "RPCs completed on the server, by status code.", "grpc_code"
        )
        self._received = counter("msg_received", "Messages received by the server.")
        self._sent = counter("msg_sent", "Messages sent by the server.")
        self._seconds = Histogram(
            "grpc_server_handling_seconds",
            "Duration of RPCs on the server, in seconds.",
            _CALL_LABELS,
            registry=registry,
            buckets=_BUCKETS_S,
        )

    def of(self, method: str, handler: grpc.RpcMethodHandler) -> MethodMetrics:
        """Returns the metrics of one method. The caller must have checked that the method exists,
        because names sent by unauthenticated clients must not become label values."""
        labels = (
            _TYPES[bool(handler.request_streaming), bool(handler.response_streaming)],
            *split_method(method),
        )
        return MethodMetrics(
            started=self._started.labels(*labels),
            handled=lambda code: self._handled.labels(*labels, code),
            received=self._received.labels(*labels),
            sent=self._sent.labels(*labels),
            seconds=self._seconds.labels(*labels),
        )


@dataclass(frozen=True, kw_only=True)
class MethodMetrics:
    """Metrics of one gRPC method, with the method's label values set."""

    started: Counter
    handled: Callable[[str], Counter]
    received: Counter
    sent: Counter
    seconds: Histogram


class ClientMetricsInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Counts the calls of synchronous channels: `channel(settings,
    interceptors=[ClientMetricsInterceptor(registry)])`.

    Create one interceptor per registry, and use it for all channels of the process. Thread-safe.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._started = Counter(
            "grpc_client_started", "RPCs started by the client.", _CALL_LABELS, registry=registry
        )
        self._handled = Counter(
            "grpc_client_handled",
            "RPCs completed by the client, by status code.",
            (*_CALL_LABELS, "grpc_code"),
            registry=registry,
        )
        self._seconds = Histogram(
            "grpc_client_handling_seconds",
            "Duration of RPCs as measured by the client, in seconds.",
            _CALL_LABELS,
            registry=registry,
            buckets=_BUCKETS_S,
        )

    def _observed(
        self,
        kind: str,
        continuation: Callable[..., Any],
        details: grpc.ClientCallDetails,
        request: Any,
    ) -> Any:
        labels = (kind, *split_method(details.method))
        self._started.labels(*labels).inc()
        start = time.perf_counter()
        call = continuation(details, request)

        def ended(done: Any) -> None:
            self._handled.labels(*labels, go_code(done.code())).inc()
            self._seconds.labels(*labels).observe(time.perf_counter() - start)

        call.add_done_callback(ended)
        return call

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request: Any
    ) -> Any:
        return self._observed("unary", continuation, details, request)

    def intercept_unary_stream(
        self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request: Any
    ) -> Any:
        return self._observed("server_stream", continuation, details, request)

    def intercept_stream_unary(
        self,
        continuation: Callable[..., Any],
        details: grpc.ClientCallDetails,
        request_iterator: Any,
    ) -> Any:
        return self._observed("client_stream", continuation, details, request_iterator)

    def intercept_stream_stream(
        self,
        continuation: Callable[..., Any],
        details: grpc.ClientCallDetails,
        request_iterator: Any,
    ) -> Any:
        return self._observed("bidi_stream", continuation, details, request_iterator)


def split_method(method: str) -> tuple[str, str]:
    """Splits "/shoal.v1.Coordinator/GetJob" into ("shoal.v1.Coordinator", "GetJob")."""
    service, _, name = method.removeprefix("/").partition("/")
    return service, name


def go_code(code: grpc.StatusCode | int | None) -> str:
    """Returns the Go name of a status code, which grpc.aio's contexts give as a number."""
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return _GO_CODES.get(number, "Unknown")
