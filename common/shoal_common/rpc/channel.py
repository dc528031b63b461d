"""Client channels for gRPC, with TLS, bearer token, keepalive, message limits and retries.
Synchronous and asyncio callers use the same settings.

Each call has its own deadline, which the clients set (shoal_common.clients). Synchronous channels
may be shared between threads and must never be used in a forked child; an asyncio channel belongs
to the loop that created it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import grpc
import grpc.aio

from shoal_common.errors import ConfigurationError
from shoal_common.rpc.client_interceptors import (
    AUTHORIZATION,
    Entries,
    async_metadata,
    sync_metadata,
)
from shoal_common.rpc.idempotence import service_config
from shoal_common.security.authentication import BEARER, MEMBER_KEY, TlsSettings
from shoal_common.settings import parse_address


@dataclass(frozen=True, kw_only=True)
class ChannelSettings:
    """Address of a server, and options for calling it."""

    address: str
    """Address (host:port) of the server."""

    tls: TlsSettings | None = None
    """TLS settings; None: no TLS, for loopback and trusted networks."""

    token: str | None = field(default=None, repr=False)
    """Bearer token sent with every call; None: no token."""

    member_key: str | None = field(default=None, repr=False)
    """Key that proves a member's identity to the services, sent with every call. None: the caller
    is not a member of a job."""

    server_name: str | None = None
    """Name expected in the server's certificate, if it is not the host of `address`."""

    deadline: timedelta = timedelta(seconds=10)
    """Default deadline of a client's unary calls."""

    keepalive: timedelta = timedelta(seconds=10)
    """Time without traffic after which a ping is sent, to detect a peer that has vanished without
    closing the connection. With `keepalive_timeout`, this must be well below a lease (30 s): a
    restarted coordinator gives each member one lease to return, and a member's new connection may
    fail as well."""

    keepalive_timeout: timedelta = timedelta(seconds=10)
    """Maximum time for the response to a ping. After that, the connection is closed."""

    max_message_bytes: int = 16 << 20
    """Maximum size of a message sent or received."""

    attempts: int = 4
    """Maximum number of attempts of an idempotent call that fails with UNAVAILABLE, 1 to 5. 1: no
    retries."""

    first_backoff: timedelta = timedelta(milliseconds=100)
    """Wait before the second attempt. It doubles with each further attempt and has jitter."""

    longest_backoff: timedelta = timedelta(seconds=2)
    """Maximum wait between two attempts."""

    def __post_init__(self) -> None:
        if parse_address(self.address).port == 0:
            raise ConfigurationError(
                f"address {self.address!r}: cannot connect to port 0; use the port on which the "
                "server listens"
            )
        for name in (
            "deadline",
            "keepalive",
            "keepalive_timeout",
            "first_backoff",
            "longest_backoff",
        ):
            if getattr(self, name) < timedelta(milliseconds=1):
                raise ConfigurationError(
                    f"{name}={getattr(self, name)}: expected at least one millisecond"
                )
        if not 1 <= self.attempts <= 5:
            raise ConfigurationError(f"attempts={self.attempts}: expected 1 to 5, gRPC's limit")
        if self.max_message_bytes < 1:
            raise ConfigurationError(
                f"max_message_bytes={self.max_message_bytes}: expected at least 1"
            )


def channel(settings: ChannelSettings, *, interceptors: Sequence[Any] = ()) -> grpc.Channel:
    """Returns a synchronous channel, which connects at the first call. `interceptors` (e.g. for
    metrics) see the call before the token is added."""
    credentials = _credentials(settings)
    options = _options(settings)
    if credentials is None:
        plain = grpc.insecure_channel(settings.address, options=options)
    else:
        plain = grpc.secure_channel(settings.address, credentials, options=options)
    entries = _entries(settings)
    return grpc.intercept_channel(
        plain, *interceptors, *((sync_metadata(entries),) if entries else ())
    )


def aio_channel(
    settings: ChannelSettings, *, interceptors: Sequence[grpc.aio.ClientInterceptor] = ()
) -> grpc.aio.Channel:
    """Returns an asyncio channel for the running event loop."""
    credentials = _credentials(settings)
    options = _options(settings)
    entries = _entries(settings)
    chain = [*interceptors, *(async_metadata(entries) if entries else ())]
    if credentials is None:
        return grpc.aio.insecure_channel(settings.address, options=options, interceptors=chain)
    return grpc.aio.secure_channel(
        settings.address, credentials, options=options, interceptors=chain
    )


def _entries(settings: ChannelSettings) -> Entries:
    token = () if settings.token is None else ((AUTHORIZATION, f"{BEARER}{settings.token}"),)
    return (*token, *(() if settings.member_key is None else ((MEMBER_KEY, settings.member_key),)))


def _credentials(settings: ChannelSettings) -> grpc.ChannelCredentials | None:
    if settings.tls is None:
        return None
    material = settings.tls.load()
    return grpc.ssl_channel_credentials(
        root_certificates=material.authority,
        private_key=material.key,
        certificate_chain=material.certificate,
    )


def _options(settings: ChannelSettings) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.keepalive_time_ms", milliseconds(settings.keepalive)),
        ("grpc.keepalive_timeout_ms", milliseconds(settings.keepalive_timeout)),
        # In grpc 1.85, the timeout above has no effect while this one (by default 60 s) is longer.
        ("grpc.http2.ping_timeout_ms", milliseconds(settings.keepalive_timeout)),
        # Pings are sent without calls too, so that an idle session detects a vanished peer.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Channels to one address share a connection by default; one client's close or token would
        # then affect another's.
        ("grpc.use_local_subchannel_pool", 1),
        # Short backoffs, so that a restarted server is found within seconds instead of minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
        # Maximum time to connect (20 s otherwise); gRPC has no separate option for it.
        ("grpc.min_reconnect_backoff_ms", 10_000),
        # Services of a cluster are reached directly: http_proxy in the environment is for other
        # destinations, and most proxies refuse CONNECT to the ports used here.
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", int(settings.attempts > 1)),
    ]
    if settings.attempts > 1:
        config = service_config(
            attempts=settings.attempts,
            first_backoff=settings.first_backoff,
            longest_backoff=settings.longest_backoff,
        )
        options.append(("grpc.service_config", config))
    if settings.server_name is not None:
        options.append(("grpc.ssl_target_name_override", settings.server_name))
    return options


def is_name(address: str) -> bool:
    """Returns whether the host of `address` (host:port) is a name rather than an IP address.

    A channel that failed to resolve a name waits up to two minutes before it tries again, and no
    option shortens this. A container's name cannot be resolved while it restarts, and its address
    may be different afterwards. Callers that use a name therefore create a new channel after a
    failure.
    """
    try:
        ipaddress.ip_address(parse_address(address).host.strip("[]"))
    except ValueError:
        return True
    return False


def milliseconds(duration: timedelta) -> int:
    """Converts a duration to milliseconds for gRPC's options; at least 1."""
    return max(1, round(duration.total_seconds() * 1000))
