"""How many descriptors this process may have open, and how many of them the bulk channel may take.

The other half is for the journal, the RPCs' connections and all else: without descriptors a server
can neither begin a file of its journal nor accept anybody. Who gets no bulk connection takes gRPC.
"""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from typing import Final

_ENOUGH: Final = 1 << 16
"""A limit that no server comes near."""
_MOST_CONNECTIONS: Final = 1024
_MOST_STRANGERS: Final = 64
_OF_A_CONNECTION: Final = 2
"""Its socket, and its shared memory."""


@dataclass(frozen=True, kw_only=True)
class BulkShare:
    """The bulk channel's part."""

    connections: int
    """How many may be open, with the tickets for more."""
    strangers: int
    """How many over each transport may not have shown a ticket yet."""

    @classmethod
    def of(cls, limit: int) -> BulkShare:
        """The share in a process that may have `limit` descriptors."""
        strangers = max(1, min(_MOST_STRANGERS, limit // 32))
        connections = (limit // 2 - 2 * strangers) // _OF_A_CONNECTION
        return cls(connections=max(0, min(_MOST_CONNECTIONS, connections)), strangers=strangers)

    @classmethod
    def of_this_process(cls) -> BulkShare:
        """The share in this process, by the limit that it has now."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls.of(_ENOUGH if soft == resource.RLIM_INFINITY else soft)


def raise_limit() -> None:
    """Lets this process have as many descriptors as it may: what a shell or a service manager gives
    is often a small part of that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox; it goes on with what it has
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
