"""Ports reserved on this machine for processes that are about to start, and port files with the
addresses of services."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from shoal_common.errors import CorruptDataError


class ReservedPort:
    """A free TCP port that stays reserved until `close`, so that it can be announced before a
    process listens on it.

    The port is bound with SO_REUSEADDR, but nothing listens on it. A process that sets SO_REUSEADDR
    too, as torch's TCPStore and gRPC do, can therefore listen on it.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(address)
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class ServiceAddresses:
    """Addresses of a service, as written to its port file."""

    grpc: str
    """Address of the gRPC service (host:port)."""
    http: str
    """Address of /metrics (host:port); empty if the service has none."""
    redis: str
    """URL of the coordinator's Redis (redis://); empty for other services."""


def read_port_file(path: Path) -> ServiceAddresses | None:
    """Reads a port file. Returns None if it does not exist yet; a service creates it atomically
    when it begins to serve requests. Raises CorruptDataError."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        content = json.loads(text)
        return ServiceAddresses(
            grpc=content["grpc"], http=content.get("http") or "", redis=content.get("redis") or ""
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(
            f"{path} is not a port file; expected JSON with the field grpc, found {text[:200]!r}"
        ) from error
