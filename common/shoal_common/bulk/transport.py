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
    """Only shared memory."""
    TCP = "tcp"
    """Only a separate TCP connection, with TLS if the RPCs use TLS."""
    GRPC = "grpc"
    """Only the connection that the RPCs use."""
