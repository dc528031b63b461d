"""The ways that tensors take between a worker and a parameter server."""

from __future__ import annotations

import enum


class Transport(enum.StrEnum):
    """How a client pushes and pulls. All carry the same messages, with the same checks."""

    AUTO = "auto"
    """The quickest that works: shared memory on one machine, else TCP, else gRPC."""
    MEMORY = "memory"
    """Shared memory alone."""
    TCP = "tcp"
    """A TCP connection of its own alone, with TLS where the RPCs have it."""
    GRPC = "grpc"
    """The RPCs' connection alone."""
