"""Transports of tensors between a worker and a parameter server."""

from __future__ import annotations

import enum


class Transport(enum.StrEnum):
    """Transport of pushes and pulls. All transports carry the same messages and check them in the
    same way."""

    AUTO = "auto"
    """The fastest one available: shared memory on the same machine, otherwise TCP, otherwise
    gRPC."""
    MEMORY = "memory"
    """Shared memory only."""
    TCP = "tcp"
    """A separate TCP connection only, with TLS if the RPCs use TLS."""
    GRPC = "grpc"
    """The RPCs' own connection only."""
