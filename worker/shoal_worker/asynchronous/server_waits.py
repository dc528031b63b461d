"""Measures how long the training thread has waited for parameter servers; heartbeats report it.

A worker that waits for a server does not hang, so it is not put out for it. Other threads speak to
servers as well: they pull values and rows ahead, and save tables. Their waits excuse nobody: the
training thread may hang in its own code meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ServerWaits:
    """The waits of one worker. Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Made by the training thread. `clock`: seconds since anywhere."""
        self._clock = clock
        self._training = threading.get_ident()
        self._waits: dict[object, tuple[float, str, int]] = {}
        """Since when, for which server, and in which thread."""
        self._collects_since: float | None = None

    def trains(self) -> None:
        """The calling thread is the training thread from now on."""
        self._training = threading.get_ident()

    @contextmanager
    def of(self, server: str) -> Iterator[None]:
        """While open, the calling thread waits for `server`."""
        wait = object()
        self._waits[wait] = (self._clock(), server, threading.get_ident())
        try:
            yield
        finally:
            del self._waits[wait]

    @contextmanager
    def collects(self) -> Iterator[None]:
        """While open, the training thread waits for other threads that speak to servers. In another
        thread it changes nothing."""
        if threading.get_ident() != self._training:
            yield
            return
        self._collects_since = self._clock()
        try:
            yield
        finally:
            self._collects_since = None

    @property
    def now(self) -> tuple[float, str]:
        """Seconds for which the training thread has waited, and the server; (0, ""): it waits for
        none."""
        collects = self._collects_since
        waits = [
            (since if thread == self._training else max(since, collects or since), server)
            for since, server, thread in list(self._waits.values())
            if thread == self._training or collects is not None
        ]
        since, server = min(waits, default=(0.0, ""))
        return (self._clock() - since, server) if waits else (0.0, "")
