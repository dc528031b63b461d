"""Limits on open file descriptors: the limit of the process, and the part of it that the bulk
channel may use.

The bulk channel may use half of the descriptors. The other half is for the journal, RPC connections
and everything else: a server without free descriptors can neither start a journal file nor accept a
connection. A client that cannot get a bulk connection uses gRPC.
"""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from typing import Final

_ENOUGH: Final = 1 << 16
"""Number of descriptors that is sufficient for any server."""
_MOST_CONNECTIONS: Final = 1024
_MOST_STRANGERS: Final = 64
_OF_A_CONNECTION: Final = 2
"""Number of descriptors that a bulk connection uses: socket and shared memory."""


@dataclass(frozen=True, kw_only=True)
class BulkShare:
    """Maximum numbers of connections of the bulk channel."""

    connections: int
    """Maximum number of open connections, including future connections whose tickets have already
    been issued."""
    strangers: int
    """Maximum number of connections per transport that have not presented a ticket."""

    @classmethod
    def of(cls, limit: int) -> BulkShare:
        """Returns the bulk channel's limits for a process that may open up to `limit`
        descriptors."""
        strangers = max(1, min(_MOST_STRANGERS, limit // 32))
        connections = (limit // 2 - 2 * strangers) // _OF_A_CONNECTION
        return cls(connections=max(0, min(_MOST_CONNECTIONS, connections)), strangers=strangers)

    @classmethod
    def of_this_process(cls) -> BulkShare:
        """Returns the bulk channel's limits, given this process's current limit on descriptors."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls.of(_ENOUGH if soft == resource.RLIM_INFINITY else soft)


def raise_limit() -> None:
    """Raises the limit on this process's file descriptors to the allowed maximum, which is often
    much higher than the default of a shell or service manager."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            # e.g. forbidden by a sandbox: keeps the current limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
