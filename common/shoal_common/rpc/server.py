"""gRPC server of all Shoal services: TLS, bearer tokens, health checks, reflection, metrics, errors
as statuses, and a graceful shutdown.

A service provides its servicer and the roles that may call each method; its handlers report errors
by raising ShoalErrors. All objects belong to the event loop that called `start`. The service's main
function handles signals and calls `drain_and_stop`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from shoal_common.errors import ConfigurationError
from shoal_common.rpc.channel import milliseconds
from shoal_common.rpc.metrics import ServerMetrics
from shoal_common.rpc.server_interceptor import Admission, ServerInterceptor
from shoal_common.security.authentication import Role, TlsSettings, TokenTable
from shoal_common.security.certificates import expiry_of, expiry_warning
from shoal_common.settings import parse_address

logger = logging.getLogger(__name__)

_A_DAY_S: Final = 24 * 3600.0
ALL_AT_ONCE: Final = (
    ("grpc.server.max_pending_requests", 30_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
)
"""Options that raise gRPC's limits on waiting calls. By default, once a thousand calls are waiting
for a handler, gRPC cancels calls at random, and once three thousand are waiting, it cancels all
further calls. Ten thousand members may connect at the same time, e.g. after a restart of the
coordinator."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Address of a server, and how it authenticates callers."""

    listen: str
    """Address (host:port) to listen on. Port 0: the operating system chooses a port, which
    `RpcServer.start` returns."""

    tls: TlsSettings | None = None
    """TLS settings; None: no TLS."""

    tokens: TokenTable = field(default_factory=TokenTable.open)
    """Accepted tokens with their roles. An open table allows every caller to do everything."""

    insecure: bool = False
    """True to allow a `listen` address that other machines can reach even if TLS or tokens are not
    configured."""

    drain_timeout: timedelta = timedelta(seconds=10)
    """Maximum time that calls in progress may take once a shutdown has begun."""

    max_message_bytes: int = 16 << 20
    """Maximum size of a message, received or sent. Larger ones fail with RESOURCE_EXHAUSTED."""

    keepalive: timedelta = timedelta(seconds=20)
    """Time without traffic after which a ping is sent, to detect a client that has vanished without
    closing the connection, and to close its streams."""

    keepalive_timeout: timedelta = timedelta(seconds=10)
    """Maximum time for the response to a ping. After that, the connection is closed."""

    shortest_keepalive: timedelta = timedelta(seconds=5)
    """Minimum interval between a client's pings. Clients that ping more often are disconnected, so
    this must not exceed the clients' `ChannelSettings.keepalive`."""

    def __post_init__(self) -> None:
        address = parse_address(self.listen)
        if self.tls is not None and self.tls.certificate is None:
            raise ConfigurationError(
                "TLS is configured without a certificate; a server needs a certificate and its key"
            )
        lacking = [
            name
            for name, lacks in (("TLS", self.tls is None), ("tokens", self.tokens.is_open))
            if lacks
        ]
        if lacking and not address.is_loopback and not self.insecure:
            raise ConfigurationError(
                f"listen={self.listen!r} can be reached from other machines without "
                f"{' or '.join(lacking)}; configure them, listen on 127.0.0.1, or pass --insecure"
            )
        if self.drain_timeout < timedelta(0):
            raise ConfigurationError(f"drain_timeout={self.drain_timeout}: expected zero or more")
        for name in ("keepalive", "keepalive_timeout", "shortest_keepalive"):
            if getattr(self, name) < timedelta(milliseconds=1):
                raise ConfigurationError(
                    f"{name}={getattr(self, name)}: expected at least one millisecond"
                )
        if self.max_message_bytes < 1:
            raise ConfigurationError(
                f"max_message_bytes={self.max_message_bytes}: expected at least 1"
            )


class RpcServer:
    """One service on one port. `start` and `drain_and_stop` must each be called once, on the same
    event loop."""

    def __init__(
        self,
        settings: ServerSettings,
        *,
        service_name: str,
        register: Callable[[grpc.aio.Server], None],
        allowed_roles: Mapping[str, frozenset[Role]],
        metrics_registry: CollectorRegistry,
        job: str | None = None,
    ) -> None:
        """Prepares a server for one service; `start` opens its port.

        Args:
            settings: address and authentication.
            service_name: e.g. "shoal.v1.Coordinator".
            register: adds the servicer to the server.
            allowed_roles: full method name, e.g. "/shoal.v1.Coordinator/CreateJob" -> roles besides
                ADMIN that may call the method. It must contain exactly the methods of the service,
                so that no method is allowed or forbidden by mistake.
            metrics_registry: registry for the metrics of calls.
            job: the only job of the service; tokens for other jobs are rejected. None: the service
                is for many jobs, and its handlers check `caller()`.

        Raises:
            ConfigurationError: `allowed_roles` does not match the methods of the service.
        """
        _check_completeness(service_name, allowed_roles)
        self.draining = asyncio.Event()
        """Event that is set when a shutdown begins. Handlers of long-lived streams should then
        return."""
        self._settings = settings
        self._service_name = service_name
        self._register = register
        self._interceptor = ServerInterceptor(
            ServerMetrics(metrics_registry), Admission(settings.tokens, allowed_roles, job=job)
        )
        self._health = health_aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._expiry_check: asyncio.TimerHandle | None = None

    async def start(self) -> int:
        """Starts the server, reports SERVING to health checks, and returns the port. Raises
        ConfigurationError if the address cannot be bound."""
        if self._server is not None:
            raise RuntimeError("this RpcServer was already started; create a new one")
        server = grpc.aio.server(
            interceptors=(self._interceptor,), options=_options(self._settings)
        )
        self._register(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (self._service_name, "grpc.health.v1.Health", reflection.SERVICE_NAME), server
        )
        port = self._bind(server)
        await self.set_serving(False)
        await server.start()
        self._server = server
        await self.set_serving(True)
        self._watch_expiry()
        logger.info("serving", extra={"service": self._service_name, "port": port})
        return port

    async def set_serving(self, serving: bool) -> None:
        """Sets the response to health checks, for the service and for the entire server. Must not
        be called once a shutdown has begun."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", self._service_name):
            await self._health.set(name, status)

    async def drain_and_stop(self) -> None:
        """Reports NOT_SERVING to health checks, rejects new calls, waits up to `drain_timeout` for
        calls in progress, then cancels them. Idempotent."""
        if self._server is None:
            return
        self.draining.set()
        if self._expiry_check is not None:
            self._expiry_check.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(self._settings.drain_timeout.total_seconds())

    def _watch_expiry(self) -> None:
        """Checks now and once a day whether the certificate has expired or will expire soon, and
        logs a warning if so.

        Checks the certificate that was loaded at startup, even if its file has been renewed since.
        """
        tls = self._settings.tls
        if tls is None or tls.certificate is None:
            return
        path, ends = tls.certificate, expiry_of(tls.certificate.read_bytes())
        if ends is not None:
            self._check_expiry(path, ends)

    def _check_expiry(self, path: Path, ends: datetime) -> None:
        if warning := expiry_warning(path, ends, now=datetime.now(UTC)):
            logger.warning("%s", warning)
        self._expiry_check = asyncio.get_running_loop().call_later(
            _A_DAY_S, self._check_expiry, path, ends
        )

    def _bind(self, server: grpc.aio.Server) -> int:
        settings = self._settings
        credentials = _credentials(settings.tls)
        try:
            if credentials is None:
                port = server.add_insecure_port(settings.listen)
            else:
                port = server.add_secure_port(settings.listen, credentials)
        except RuntimeError as error:
            raise ConfigurationError(
                f"cannot listen on {settings.listen}: {error}; free the address, or use port 0 to "
                "get a free port"
            ) from error
        return int(port)


def _check_completeness(service_name: str, allowed_roles: Mapping[str, frozenset[Role]]) -> None:
    try:
        service = descriptor_pool.Default().FindServiceByName(service_name)
    except KeyError:
        raise ConfigurationError(
            f"service {service_name!r} is unknown; import its generated module first"
        ) from None
    methods = {f"/{service_name}/{method.name}" for method in service.methods}
    if missing := methods - allowed_roles.keys():
        raise ConfigurationError(f"allowed_roles is missing {', '.join(sorted(missing))}")
    if unknown := allowed_roles.keys() - methods:
        raise ConfigurationError(
            f"allowed_roles contains methods that {service_name} does not have: "
            f"{', '.join(sorted(unknown))}"
        )


def _credentials(tls: TlsSettings | None) -> grpc.ServerCredentials | None:
    if tls is None:
        return None
    material = tls.load()
    return grpc.ssl_server_credentials(
        [(material.key, material.certificate)],
        root_certificates=material.client_authority,
        require_client_auth=tls.client_authority is not None,
    )


def _options(settings: ServerSettings) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        # Otherwise two servers could share a port without an error, and each would get some of the
        # calls.
        ("grpc.so_reuseport", 0),
        # Clients ping idle connections (ChannelSettings.keepalive); with more frequent pings, the
        # server closes the connection with GOAWAY. The C name of this option is
        # MIN_RECV_PING_INTERVAL_WITHOUT_DATA; its string differs.
        ("grpc.http2.min_ping_interval_without_data_ms", milliseconds(settings.shortest_keepalive)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", milliseconds(settings.keepalive)),
        ("grpc.keepalive_timeout_ms", milliseconds(settings.keepalive_timeout)),
        # In grpc 1.85, the timeout above has no effect while this one (by default 60 s) is longer.
        ("grpc.http2.ping_timeout_ms", milliseconds(settings.keepalive_timeout)),
        ("grpc.http2.max_pings_without_data", 0),
        *ALL_AT_ONCE,
    ]
