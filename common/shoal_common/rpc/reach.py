"""Finds out why a gRPC server cannot be reached, since gRPC itself in most cases reports only
UNAVAILABLE.

The probe performs the steps of a gRPC connection individually, on a plain socket: name lookup, TCP
connection, TLS handshake, and the first HTTP/2 frames. It makes no call and sends no token.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from shoal_common.errors import ConfigurationError
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.security.authentication import TlsSettings
from shoal_common.settings import Address, parse_address

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""First bytes that an HTTP/2 client sends (RFC 9113, section 3.4): the preface and an empty
SETTINGS frame."""
_OF_CERTIFICATES: Final = ("certificate", "unknown ca")
"""Substrings of the names of TLS alerts about a client's certificate. Other alerts have different
causes; for example, a proxy sends them while its server restarts."""
_FRAME_HEADER: Final = 9
_SETTINGS: Final = 4


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """Reason why a server cannot be reached."""

    cause: str
    """Human-readable description, with the remedy if there is one."""
    permanent: bool
    """True if retrying does not help until someone changes a setting or a certificate."""


def find_obstacle(
    settings: ChannelSettings, *, timeout: timedelta = timedelta(seconds=2)
) -> Obstacle | None:
    """Tries to reach the server. Returns the reason why it cannot be reached; None if the server
    responds with HTTP/2.

    Blocks during the system's name lookup, and then for at most `timeout` per step.
    """
    address = parse_address(settings.address)
    host = address.host.strip("[]")
    try:
        socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return Obstacle(
            cause=f"the host name {address.host!r} cannot be resolved ({error.strerror})",
            permanent=False,
        )
    try:
        connection = socket.create_connection((host, address.port), timeout.total_seconds())
    except OSError as error:
        return Obstacle(cause=_not_connected(address, error, timeout), permanent=False)
    with connection:
        try:
            if settings.tls is None:
                return _try_plain(connection)
            return _try_tls(connection, settings.tls, settings.server_name or host)
        except TimeoutError:
            cause = (
                f"{settings.address} accepted a connection but did not respond within "
                f"{timeout.total_seconds():g} s"
            )
            return Obstacle(cause=cause, permanent=False)
        except ConfigurationError as error:
            return Obstacle(cause=str(error), permanent=True)
        except OSError as error:
            return Obstacle(
                cause=f"{settings.address} closed the connection ({error.strerror or error})",
                permanent=False,
            )


def _not_connected(address: Address, error: OSError, timeout: timedelta) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens at {address} (connection refused)"
    if isinstance(error, TimeoutError):
        return (
            f"{address} did not accept a connection within {timeout.total_seconds():g} s; check "
            "the address and firewalls"
        )
    return f"cannot connect to {address} ({error.strerror or error})"


def _try_plain(connection: socket.socket) -> Obstacle | None:
    connection.sendall(_PREFACE)
    answer = _receive(connection)
    if _speaks_http2(answer):
        return None
    remedy = "set the certificate authority (--tls-ca, SHOAL_TLS_CA)"
    if answer[:2] == b"\x15\x03":  # a TLS alert
        return Obstacle(
            cause=f"the server expects TLS, but none is configured here; {remedy}", permanent=True
        )
    if not answer:
        return Obstacle(
            cause=f"the server closed the unencrypted connection; if it expects TLS, {remedy}",
            permanent=False,
        )
    return Obstacle(
        cause=f"the program listening there is not a gRPC server; it sent {answer[:20]!r}",
        permanent=False,
    )


def _try_tls(connection: socket.socket, tls: TlsSettings, name: str) -> Obstacle | None:
    context = tls.client_context()
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connection, server_hostname=name) as secured:
            secured.sendall(_PREFACE)
            # with TLS 1.3, a server rejects the client's certificate only after the handshake
            answer = _receive(secured)
    except ssl.SSLCertVerificationError as error:
        return Obstacle(cause=_distrusted(error, tls, name), permanent=True)
    except ssl.SSLEOFError:
        return Obstacle(
            cause="the server closed the connection during the TLS handshake; it may not use TLS",
            permanent=False,
        )
    except ssl.SSLError as error:
        return _refused(error, tls)
    if _speaks_http2(answer):
        return None
    if not answer:  # gRPC's servers send no alert
        cause = (
            "the server closed the connection after the TLS handshake; "
            f"{_unwanted_certificate(tls)}"
        )
        return Obstacle(cause=cause, permanent=False)
    return Obstacle(
        cause=f"the program listening there is not a gRPC server; it sent {answer[:20]!r}",
        permanent=False,
    )


def _distrusted(error: ssl.SSLCertVerificationError, tls: TlsSettings, name: str) -> str:
    authority = (
        "the system's certificate authorities"
        if tls.authority is None
        else f"the authority in {tls.authority}"
    )
    if "expired" in error.verify_message:
        return "the server's certificate has expired; renew it (shoal certs) and restart the server"
    if "not yet valid" in error.verify_message:
        return "the server's certificate is not valid yet; check the clocks of both machines"
    if "mismatch" in error.verify_message or "doesn't match" in error.verify_message:
        return f"the server's certificate is not valid for {name!r}: {error.verify_message}"
    return (
        f"the server's certificate is not signed by {authority} ({error.verify_message}); check "
        "--tls-ca (SHOAL_TLS_CA)"
    )


def _refused(error: ssl.SSLError, tls: TlsSettings) -> Obstacle:
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "wrong version number" in reason or "record layer failure" in reason:
        cause = (
            "the server does not use TLS; remove the TLS settings here, or start the server with a "
            "certificate"
        )
        return Obstacle(cause=cause, permanent=True)
    if "alert" in reason:
        cause = f"the server aborted the TLS handshake ({reason}); {_unwanted_certificate(tls)}"
        return Obstacle(cause=cause, permanent=any(each in reason for each in _OF_CERTIFICATES))
    return Obstacle(cause=f"the TLS handshake failed ({reason})", permanent=False)


def _unwanted_certificate(tls: TlsSettings) -> str:
    if tls.certificate is None:
        return (
            "it may require a client certificate, but none is configured (--tls-cert, "
            "SHOAL_TLS_CERT)"
        )
    return (
        f"it may have rejected the client certificate {tls.certificate} (--tls-cert, "
        "SHOAL_TLS_CERT)"
    )


def _receive(connection: socket.socket) -> bytes:
    """Returns the first bytes of the server's response. They contain at least the header of a
    frame, unless the server closes the connection before that."""
    answer = b""
    while len(answer) < _FRAME_HEADER:
        try:
            data = connection.recv(64)
        except ConnectionResetError:
            break
        if not data:
            break
        answer += data
    return answer


def _speaks_http2(answer: bytes) -> bool:
    return len(answer) >= _FRAME_HEADER and answer[3] == _SETTINGS
