"""The bearer token on every outgoing call.

gRPC's own call credentials refuse to travel without TLS; an interceptor also works on insecure loopback, where tests and local clusters
run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

AUTHORIZATION = "authorization"


class _SyncDetails(grpc.ClientCallDetails):
    """The details of a call with one more metadata entry."""

    def __init__(self, details: Any, entry: tuple[str, str]) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = (*(details.metadata or ()), entry)
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression


class _SyncBearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, token: str) -> None:
        self._entry = (AUTHORIZATION, f"Bearer {token}")

    def _intercept(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(_SyncDetails(details, self._entry), request)

    intercept_unary_unary = _intercept
    intercept_unary_stream = _intercept
    intercept_stream_unary = _intercept
    intercept_stream_stream = _intercept


class _AsyncBearer:
    def __init__(self, token: str) -> None:
        self._entry = (AUTHORIZATION, f"Bearer {token}")

    async def _intercept(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), self._entry)
        return await continuation(
            grpc.aio.ClientCallDetails(details.method, details.timeout, metadata, details.credentials, details.wait_for_ready), request
        )


class _AsyncUnaryUnary(_AsyncBearer, grpc.aio.UnaryUnaryClientInterceptor):
    intercept_unary_unary = _AsyncBearer._intercept


class _AsyncUnaryStream(_AsyncBearer, grpc.aio.UnaryStreamClientInterceptor):
    intercept_unary_stream = _AsyncBearer._intercept


class _AsyncStreamUnary(_AsyncBearer, grpc.aio.StreamUnaryClientInterceptor):
    intercept_stream_unary = _AsyncBearer._intercept


class _AsyncStreamStream(_AsyncBearer, grpc.aio.StreamStreamClientInterceptor):
    intercept_stream_stream = _AsyncBearer._intercept


def sync_bearer_token(token: str) -> grpc.UnaryUnaryClientInterceptor:
    """One interceptor for all four kinds of call."""
    return _SyncBearer(token)


def async_bearer_token(token: str) -> tuple[grpc.aio.ClientInterceptor, ...]:
    """Four: grpc.aio files each interceptor under the first kind that it recognises."""
    return (_AsyncUnaryUnary(token), _AsyncUnaryStream(token), _AsyncStreamUnary(token), _AsyncStreamStream(token))
