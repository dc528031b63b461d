"""Interceptors of outgoing calls. They add the caller's credentials to each call (the bearer token,
and a member's key), and report finished calls to callbacks.

gRPC's own call credentials require TLS. Interceptors also work over unencrypted loopback, which
tests and local clusters use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

AUTHORIZATION = "authorization"
Entries = tuple[tuple[str, str], ...]


def with_entries(metadata: Any, entries: Entries) -> Entries:
    """Returns the metadata of a call with these entries added. Entries set by the call itself take
    precedence."""
    given = tuple(metadata or ())
    names = {name for name, _ in given}
    return (*given, *(entry for entry in entries if entry[0] not in names))


class _SyncDetails(grpc.ClientCallDetails):
    """Details of a call, with additional metadata entries."""

    def __init__(self, details: Any, entries: Entries) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = with_entries(details.metadata, entries)
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression


class _SyncMetadata(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, entries: Entries) -> None:
        self._entries = entries

    def _intercept(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(_SyncDetails(details, self._entries), request)

    intercept_unary_unary = _intercept
    intercept_unary_stream = _intercept
    intercept_stream_unary = _intercept
    intercept_stream_stream = _intercept


class _AsyncMetadata:
    def __init__(self, entries: Entries) -> None:
        self._entries = entries

    async def _intercept(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*with_entries(details.metadata, self._entries))
        return await continuation(
            grpc.aio.ClientCallDetails(
                details.method,
                details.timeout,
                metadata,
                details.credentials,
                details.wait_for_ready,
            ),
            request,
        )


class _AsyncUnaryUnary(_AsyncMetadata, grpc.aio.UnaryUnaryClientInterceptor):
    intercept_unary_unary = _AsyncMetadata._intercept


class _AsyncUnaryStream(_AsyncMetadata, grpc.aio.UnaryStreamClientInterceptor):
    intercept_unary_stream = _AsyncMetadata._intercept


class _AsyncStreamUnary(_AsyncMetadata, grpc.aio.StreamUnaryClientInterceptor):
    intercept_stream_unary = _AsyncMetadata._intercept


class _AsyncStreamStream(_AsyncMetadata, grpc.aio.StreamStreamClientInterceptor):
    intercept_stream_stream = _AsyncMetadata._intercept


def sync_metadata(entries: Entries) -> grpc.UnaryUnaryClientInterceptor:
    """Returns an interceptor for synchronous channels that adds `entries` to all four kinds of
    calls."""
    return _SyncMetadata(entries)


def async_metadata(entries: Entries) -> tuple[grpc.aio.ClientInterceptor, ...]:
    """Returns interceptors for asyncio channels that add `entries` to calls. There is one for each
    kind of call, since grpc.aio uses an interceptor only for the first kind that it recognizes."""
    return (
        _AsyncUnaryUnary(entries),
        _AsyncUnaryStream(entries),
        _AsyncStreamUnary(entries),
        _AsyncStreamStream(entries),
    )


@dataclass(frozen=True, kw_only=True)
class ClientCall:
    """A finished call, as seen by the client."""

    method: str
    """Full method name, such as /shoal.v1.Coordinator/GetJob."""
    seconds: float
    code: str
    """Name of the gRPC status code, such as DEADLINE_EXCEEDED."""


class FinishedCalls(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Reports finished calls of synchronous channels to callbacks, which may be added while the
    channels are in use. Thread-safe."""

    def __init__(self) -> None:
        self._followers: tuple[Callable[[ClientCall], None], ...] = ()

    def follow(self, finished: Callable[[ClientCall], None]) -> None:
        """Registers a callback for calls started from now on. gRPC invokes it on its own threads,
        so it must not block."""
        self._followers = (*self._followers, finished)

    def _intercept(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        followers = self._followers
        if not followers:
            return continuation(details, request)
        began = time.perf_counter()
        call = continuation(details, request)

        def finished(done: Any) -> None:
            ended = ClientCall(
                method=details.method,
                seconds=time.perf_counter() - began,
                code=done.code().name,
            )
            for follower in followers:
                follower(ended)

        call.add_done_callback(finished)
        return call

    intercept_unary_unary = _intercept
    intercept_unary_stream = _intercept
    intercept_stream_unary = _intercept
    intercept_stream_stream = _intercept
