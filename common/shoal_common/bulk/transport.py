"""Transports for tensors between a worker and a parameter server."""

from __future__ import annotations

import enum


class Transport(enum.StrEnum):
    """Transport of pushes and pulls. All transports carry the same messages with the same
    checks."""

    AUTO = "auto"
    """The fastest available: shared memory on one machine, otherwise TCP, otherwise gRPC."""
    MEMORY = "memory"
    """Shared memory only."""
    TCP = "tcp"
    """A separate TCP connection only, with TLS if the RPCs use it."""
    GRPC = "grpc"
    """The RPCs' connection only."""
