"""Logs the stack of a blocked event loop, so that the log of an unresponsive service shows the line
where it hangs. A metric counts the blocked time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from shoal_common.system.frames import current_frames
from shoal_common.system.kernel_waits import kernel_wait

logger = logging.getLogger(__name__)

_MOST_FRAMES: Final = 20
_AGAIN_S: Final = 60.0
"""Minimum time in seconds between two reports."""


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """State of a loop as of the last tick of the watch's timer. Other threads read it, so it is
    replaced instead of modified."""

    turned_at: float
    """Monotonic time in seconds."""
    blocked_s: float
    """Total time, in seconds, that the loop has been blocked."""

    def at(self, now: float, after_s: float) -> _Seen:
        """Returns the state after a tick at the time `now`. If the previous tick was more than
        `after_s` seconds earlier, the time in between counts as blocked."""
        passed_s = now - self.turned_at
        return _Seen(
            turned_at=now, blocked_s=self.blocked_s + (passed_s if passed_s > after_s else 0.0)
        )


class LoopWatch(Collector):
    """Watches the running event loop on a separate thread, until `close`.

    A timer on the loop records the time at intervals of a quarter of `after`, the time after which
    the loop counts as blocked. If the last record is older than `after`, the thread logs what the
    loop's thread is executing, innermost call first, at most once a minute. A call that holds the
    GIL blocks the watching thread too; it is logged without a stack once it has returned.
    """

    def __init__(
        self,
        name: str,
        registry: CollectorRegistry,
        *,
        after: timedelta = timedelta(seconds=5),
    ) -> None:
        """Starts watching. Must be called on the loop's thread.

        Args:
            name: name of the service, used in logs.
            registry: registry for the metric of the blocked time.
            after: time after which the loop counts as blocked.
        """
        self._name, self._after_s = name, after.total_seconds()
        self._loop = asyncio.get_running_loop()
        self._native_id, self._ident = threading.get_native_id(), threading.get_ident()
        self._reported_at = -_AGAIN_S
        self._closed = threading.Event()
        self._seen = _Seen(turned_at=time.monotonic(), blocked_s=0.0)
        registry.register(self)
        self._turns = self._loop.call_soon(self._turn)
        self._thread = threading.Thread(target=self._watch, name="shoal-loop-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching. Must be called on the loop's thread."""
        self._turns.cancel()
        self._closed.set()
        self._thread.join()

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yields the total blocked time. If the loop is blocked at present, this includes the time
        since it was last seen running."""
        now = time.monotonic()  # read before `_seen`, so that the counter never decreases
        seen = self._seen.at(now, self._after_s)
        yield CounterMetricFamily(
            "shoal_event_loop_blocked_seconds",
            "Time for which the service's event loop was blocked, or its process stopped, for "
            "more than 5 s at a time.",
            value=seen.blocked_s,
        )

    def _turn(self) -> None:
        now = time.monotonic()
        blocked_s = now - self._seen.turned_at
        self._seen = self._seen.at(now, self._after_s)
        if blocked_s > self._after_s:
            logger.warning(
                "the event loop of %s was blocked, or its process stopped, for %.1f s",
                self._name,
                blocked_s,
            )
        self._turns = self._loop.call_later(self._after_s / 4, self._turn)

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while not self._closed.wait(self._after_s / 4):
            now = time.monotonic()
            blocked_s, late = now - self._seen.turned_at, now > looked_at + self._after_s
            looked_at = now
            if late:  # the process was stopped, or a call held Python's lock: not the current stack
                continue
            if blocked_s > self._after_s and now >= self._reported_at + _AGAIN_S:
                self._reported_at = now
                self._report(blocked_s)

    def _report(self, blocked_s: float) -> None:
        frame = current_frames().get(self._ident)
        stack: list[str] = []
        while frame is not None and len(stack) < _MOST_FRAMES:
            code = frame.f_code
            stack.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
            frame = frame.f_back
        waits_for = kernel_wait(self._native_id)
        logger.warning(
            "the event loop of %s has been blocked for %.1f s%s:\n%s",
            self._name,
            blocked_s,
            f", {waits_for}" if waits_for else "",
            "\n".join(stack),
        )
