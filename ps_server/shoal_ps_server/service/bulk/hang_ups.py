"""Detects that a peer has disconnected while its connection is not being read. This is needed while
a stream waits for other members or for the journal: if the peer has sent data that is not read yet,
the server would otherwise not notice the end of the connection. gRPC cancels its own calls in this
case; this module does the same for bulk connections. Belongs to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class HangUps:
    """Watches the connections of one server. Must be closed with `close`. On systems without epoll
    it has no effect; a stream whose peer has disconnected then ends at its next send or receive."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, Callable[[], object]] = {}
        """Descriptor -> callback to call when the peer disconnects."""
        self._poll = select.epoll() if hasattr(select, "epoll") else None
        if self._poll is not None:
            self._loop.add_reader(self._poll.fileno(), self._look)

    @contextmanager
    def watched(self, descriptor: int, gone: Callable[[], object]) -> Iterator[None]:
        """Calls `gone` if the peer of a socket disconnects while the block runs."""
        if self._poll is None:
            yield
            return
        self._waiting[descriptor] = gone
        # without EPOLLIN, which unread data would trigger
        self._poll.register(descriptor, select.EPOLLRDHUP)
        try:
            yield
        finally:
            self._forget(descriptor)

    def close(self) -> None:
        """Stops watching. Idempotent."""
        if self._poll is not None and not self._poll.closed:
            self._loop.remove_reader(self._poll.fileno())
            self._poll.close()

    def _look(self) -> None:
        assert self._poll is not None
        for descriptor, _ in self._poll.poll(0):
            gone = self._waiting.get(descriptor)
            self._forget(descriptor)
            if gone is not None:
                gone()

    def _forget(self, descriptor: int) -> None:
        if (
            self._poll is not None
            and self._waiting.pop(descriptor, None) is not None
            and not self._poll.closed
        ):
            with contextlib.suppress(OSError):  # a closed descriptor is no longer registered
                self._poll.unregister(descriptor)
