"""Small HTTP server of each service, in addition to gRPC: `/metrics`, `/healthz` and GET routes of
the service (the coordinator's `/sd` and its status page).

It uses threads and the standard library: a scrape arrives every few seconds and must be answered
even while the event loop is busy. Routes therefore run concurrently on threads of this server. It
is for operators and Prometheus, not for data. It has no TLS: put a proxy in front of it, or keep it
on a private network.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import parse_qsl, urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from shoal_common.errors import (
    AuthenticationError,
    ConfigurationError,
    InvalidRequestError,
    PermissionDeniedError,
    ShoalError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_common.security.authentication import ANYONE, Holder, TokenTable
from shoal_common.settings import Address, parse_address

logger = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S: Final = 10
_BACKLOG: Final = 128
"""Maximum number of connections waiting to be accepted. In a larger burst, the kernel drops
packets, which clients send again after a second."""
_MOST_OPEN: Final = 64
"""Number of open connections above which the oldest ones are closed, so that clients that send
their requests slowly or never cannot block other clients."""
_MOST_SERVED: Final = 256
"""Maximum number of connections with a thread, including closed ones whose routes are still
running. Any further connection is closed immediately."""


@dataclass(frozen=True)
class HttpRequest:
    """A GET request."""

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    holder: Holder = ANYONE
    """Holder of the token sent with the request."""


@dataclass(frozen=True)
class HttpResponse:
    """Response to a GET request."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, value: Any, *, status: int = HTTPStatus.OK) -> HttpResponse:
        return cls(json.dumps(value).encode(), "application/json", status)

    @classmethod
    def text(cls, text: str, *, status: int = HTTPStatus.OK) -> HttpResponse:
        return cls(f"{text}\n".encode(), status=status)


Route = Callable[[HttpRequest], HttpResponse]
"""Function that responds to the GET requests of one path, on a thread of the HTTP server.
UnknownResourceError becomes status 404, InvalidRequestError 400, UnavailableError 503, everything
else 500."""


class HttpServer:
    """A running HTTP server. A context manager. `close()` is idempotent and waits for the listening
    thread."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="shoal-http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        """Address (host:port) on which the server listens."""
        return str(Address(str(self._server.server_address[0]), self.port))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._server.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        # serve_forever is not used, because it wakes up several times a second to check whether it
        # must end, and every worker has one of these servers.
        while not self._closed:
            self._server.handle_request()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def serve_metrics(
    listen: str,
    registry: CollectorRegistry,
    *,
    routes: Mapping[str, Route] | None = None,
    unhealthy: Callable[[], str | None] = lambda: None,
    tokens: TokenTable | None = None,
    job: str | None = None,
    without_token: Collection[str] = (),
    checking_job: Collection[str] = (),
) -> HttpServer:
    """Starts an HTTP server, which runs until it is closed. Raises ConfigurationError if the
    address cannot be bound.

    Args:
        listen: address (host:port) to listen on; port 0 means a free port (`.port`).
        registry: metrics to serve.
        routes: path -> function that responds to its requests.
        unhealthy: returns the reason for a 503 from /healthz, or None for a 200.
        tokens: accepted tokens. Unless the table is open, every path except /healthz and
            `without_token` requires a token, with any role.
        job: the only job that the pages show; None: they show all jobs, so tokens for a single job
            are rejected.
        without_token: paths that need no token.
        checking_job: paths that accept a token for a single job, because their routes check the
            request's holder.
    """
    address = parse_address(listen)
    table: dict[str, Route] = {
        "/metrics": lambda request: _metrics(registry, request),
        "/healthz": lambda request: _healthz(unhealthy()),
        **(routes or {}),
    }
    required = None if tokens is None or tokens.is_open else tokens

    class Handler(_Handler):
        routes = table
        tokens = required
        only_job = job
        open_paths = frozenset({"/healthz", *without_token})
        checking_paths = frozenset(checking_job)

    class Server(_BoundedServer):
        address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET

    try:
        server = Server((address.host, address.port), Handler)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {listen}: {error}; free the address, or use port 0 to get a free "
            "port"
        ) from error
    return HttpServer(server)


class _BoundedServer(ThreadingHTTPServer):
    """HTTP server with one thread per connection and a limited number of connections."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = _BACKLOG

    def __init__(self, *arguments: Any) -> None:
        self._served: dict[socket.socket, None] = {}
        """Open connections, oldest first."""
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection. If too many connections are open, closes the oldest
        ones; if too many have a thread, closes this one instead. Must be called on the listening
        thread."""
        with self._lock:
            too_many = len(self._served) >= _MOST_SERVED
            slow = list(self._served)[: max(0, len(self._served) + 1 - _MOST_OPEN)]
            if not too_many:
                self._served[request] = None
            for connection in slow:
                with contextlib.suppress(OSError):  # the peer has disconnected
                    connection.shutdown(socket.SHUT_RDWR)
        if too_many:
            super().shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection. Must be called on the connection's own thread."""
        with self._lock:
            self._served.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a client's connection broke", exc_info=True, extra={"client": client_address})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "shoal"
    sys_version = ""
    timeout = _REQUEST_TIMEOUT_S
    routes: Mapping[str, Route]
    tokens: TokenTable | None
    only_job: str | None
    open_paths: frozenset[str]
    checking_paths: frozenset[str]

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        request = HttpRequest(
            parts.path,
            dict(parse_qsl(parts.query)),
            {key.lower(): value for key, value in self.headers.items()},
        )
        response = self._answer(request)
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        if response.status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in response.headers.items():
            self.send_header(name, value)
        # Each connection carries one request: an idle connection would occupy a thread, and scrapes
        # are seconds apart.
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(response.body)

    def _answer(self, request: HttpRequest) -> HttpResponse:
        route = self.routes.get(request.path)
        if route is None:
            return HttpResponse.text(
                f"no such page; available pages: {', '.join(sorted(self.routes))}",
                status=HTTPStatus.NOT_FOUND,
            )
        try:
            if self.tokens is not None and request.path not in self.open_paths:
                request = replace(request, holder=self._admitted(request, self.tokens))
            return route(request)
        except AuthenticationError as error:
            return HttpResponse.text(str(error), status=HTTPStatus.UNAUTHORIZED)
        except PermissionDeniedError as error:
            return HttpResponse.text(str(error), status=HTTPStatus.FORBIDDEN)
        except UnknownResourceError as error:
            return HttpResponse.text(str(error), status=HTTPStatus.NOT_FOUND)
        except InvalidRequestError as error:
            return HttpResponse.text(str(error), status=HTTPStatus.BAD_REQUEST)
        except UnavailableError as error:
            return HttpResponse.text(str(error), status=HTTPStatus.SERVICE_UNAVAILABLE)
        except Exception as error:
            logger.exception("an HTTP handler failed", extra={"path": request.path})
            known = (
                str(error)
                if isinstance(error, ShoalError)
                else f"{type(error).__name__}; see the log"
            )
            return HttpResponse.text(
                f"{request.path} failed: {known}", status=HTTPStatus.INTERNAL_SERVER_ERROR
            )

    def _admitted(self, request: HttpRequest, tokens: TokenTable) -> Holder:
        holder = tokens.holder_of(request.headers.get("authorization"))
        if self.only_job is not None:
            holder.check_job(self.only_job)
        elif holder.job is not None and request.path not in self.checking_paths:
            raise PermissionDeniedError(
                f"this page shows all jobs, but the token is only for job {holder.job!r}; use a "
                "token for all jobs",
                reason="JOB_NOT_ALLOWED",
            )
        return holder

    def log_message(self, format: str, *arguments: Any) -> None:
        logger.debug(format, *arguments)


def _metrics(registry: CollectorRegistry, request: HttpRequest) -> HttpResponse:
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return HttpResponse(encode(registry), content_type)


def _healthz(reason: str | None) -> HttpResponse:
    return (
        HttpResponse.text("ok")
        if reason is None
        else HttpResponse.text(reason, status=HTTPStatus.SERVICE_UNAVAILABLE)
    )
