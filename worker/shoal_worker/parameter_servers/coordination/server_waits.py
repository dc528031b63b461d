"""Measures how long the training thread has been waiting for a parameter server; heartbeats report
this time.

A worker that is waiting for a server is not stuck, so the coordinator must not remove it. Other
threads also call servers, to prefetch values and rows and to save tables. Their waits are not
measured, because the training thread may be stuck in its own code meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ServerWaits:
    """One worker's waits for parameter servers. May be used from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Must be called on the training thread, because only this thread's waits are measured.
        `clock`: returns monotonic time in seconds."""
        self._clock = clock
        self._training = threading.get_ident()
        self._waits: dict[object, tuple[float, str, int]] = {}
        """Start time, server and thread id of each wait."""
        self._collects_since: float | None = None

    def trains(self) -> None:
        """Makes the calling thread the training thread, whose waits are measured."""
        self._training = threading.get_ident()

    @contextmanager
    def of(self, server: str) -> Iterator[None]:
        """Context in which the calling thread is recorded as waiting for `server`."""
        wait = object()
        self._waits[wait] = (self._clock(), server, threading.get_ident())
        try:
            yield
        finally:
            del self._waits[wait]

    @contextmanager
    def collects(self) -> Iterator[None]:
        """Context in which the training thread waits for other threads: any wait of theirs for a
        server is then recorded as its own. Has no effect if called on another thread."""
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
        """Returns how many seconds the training thread has been waiting, and for which server; (0,
        "") if it is not waiting."""
        collects = self._collects_since
        waits = [
            (since if thread == self._training else max(since, collects or since), server)
            for since, server, thread in list(self._waits.values())
            if thread == self._training or collects is not None
        ]
        since, server = min(waits, default=(0.0, ""))
        return (self._clock() - since, server) if waits else (0.0, "")
