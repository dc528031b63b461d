"""Delivers reports to one sink on a separate thread, so that training never waits for a tracker.

The training thread appends to a bounded queue. If the sink raises an error, the reports stay in the
queue, and the thread retries at growing intervals. If the queue is full, further reports are
dropped. Their number is logged once: when the tracker is reachable again, or at the end of the run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Final

from shoal_common.backoff import Backoff

from shoal_worker.tracking.sinks import Report, Sink, TrackedRun

_log = logging.getLogger(__name__)

MOST_WAITING: Final = 10_000
"""Maximum number of reports in the queue."""
_BATCH: Final = 500
"""Maximum number of reports in one call to the sink."""
_LONGEST_PAUSE_S: Final = 30.0
"""Maximum time between two attempts to reach a tracker, in seconds."""


@dataclass(frozen=True)
class _Open:
    run: TrackedRun
    step: int


@dataclass(frozen=True)
class _Close:
    ended: bool


class Delivery:
    """Queue and thread of one sink. All methods except `wait` return immediately."""

    def __init__(self, sink: Sink, *, limit: int = MOST_WAITING) -> None:
        """`limit`: maximum number of reports in the queue."""
        self._sink = sink
        self._name = type(sink).__name__
        self._limit = limit
        self._changed = threading.Condition()
        self._queue: deque[_Open | Report | _Close] = deque()
        self._dropped = 0
        """Number of dropped reports that have not been logged yet."""
        self._dropped_steps = (0, 0)
        """First and last step of the dropped reports that have not been logged yet."""
        self._ends = False
        """True once the rank is leaving the run. Nothing more is then queued."""
        self._error: Exception | None = None
        """Error of the last attempt; None if it succeeded."""
        self._opening: _Open | None = None
        """Arguments for opening the sink, kept so that the opening can be retried; None if the sink
        is not open."""
        self._is_open = False
        self._thread = threading.Thread(
            target=self._deliver, name=f"shoal-{self._name.lower()}", daemon=True
        )
        # started before the loop, because a start waits for the new thread
        self._thread.start()

    def open(self, *, run: TrackedRun, step: int, reports: Sequence[Report] = ()) -> None:
        """Opens the sink, with `step` as the first step to write, and queues `reports`. An open
        sink is closed first."""
        with self._changed:
            self._queue.append(_Open(run, step))
            self._queue.extend(reports)
            self._changed.notify()

    def put(self, report: Report) -> None:
        """Queues a report for the sink. Drops the report if the queue is full."""
        self._append(report)

    def close(self) -> None:
        """Closes the sink once the queued reports are written. Called when another rank becomes the
        one that writes."""
        self._append(_Close(ended=False))

    def end(self) -> None:
        """Closes the sink once the queued reports are written. Called when this rank is leaving the
        run."""
        with self._changed:
            # together, because the thread ends as soon as it sees an empty queue and `_ends`
            self._ends = True
            self._queue.append(_Close(ended=True))
            self._changed.notify()

    def wait(self, give_up_at: float) -> None:
        """Waits until the tracker has received all reports. Must be called after `end`. If the
        tracker is unreachable, makes only one more attempt. Logs the number of reports that the
        tracker did not receive.

        `give_up_at`: latest time at which the wait ends, in seconds of `time.monotonic`.
        """
        self._thread.join(max(0.0, give_up_at - time.monotonic()))
        with self._changed:
            missing = [item for item in self._queue if not isinstance(item, _Open | _Close)]
            error, lost = self._error, self._dropped + len(missing)
            if error is None and not lost and not self._thread.is_alive():
                return
            reason = f"{type(error).__name__}: {error}" if error is not None else "it was too slow"
            if not lost:
                _log.error("%s could not be closed: %s", self._name, reason)
                return
            first = self._dropped_steps[0] if self._dropped else missing[0].step
            last = max([self._dropped_steps[1], *(report.step for report in missing[-1:])])
            if self._dropped:
                first = min([first, *(report.step for report in missing[:1])])
        _log.error(
            "%s did not receive %d reports of steps %d to %d: %s",
            self._name,
            lost,
            first,
            last,
            reason,
        )

    def _append(self, item: Report | _Close) -> None:
        with self._changed:
            if len(self._queue) >= self._limit and not isinstance(item, _Close):
                first = self._dropped_steps[0] if self._dropped else item.step
                self._dropped_steps = first, item.step
                self._dropped += 1
                return
            self._queue.append(item)
            self._changed.notify()

    def _deliver(self) -> None:
        pauses = Backoff(longest_s=_LONGEST_PAUSE_S)
        items: list[_Open | Report | _Close] | None = []
        while True:
            if not self._error:  # otherwise the same items are retried
                items = self._next()
            if items is None:
                return
            ends = self._ends
            try:
                self._pass_on(items)
            except Exception as error:  # any error of a tracker's client: training continues
                self._failed(error)
                if ends:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._ends, pauses.next_s())
                continue
            pauses.reset()
            self._passed_on(len(items))

    def _next(self) -> list[_Open | Report | _Close] | None:
        """Waits until the queue has an item, and returns the items for the next call to the sink.
        They stay in the queue until they are written. Returns None after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._ends)
            if not self._queue:
                return None
            if isinstance(self._queue[0], _Open | _Close):
                return [self._queue[0]]
            return list(
                takewhile(
                    lambda item: not isinstance(item, _Open | _Close), islice(self._queue, _BATCH)
                )
            )

    def _pass_on(self, items: Sequence[_Open | Report | _Close]) -> None:
        sink, first = self._sink, items[0]
        if isinstance(first, _Close):
            was_open, self._is_open = self._is_open, False
            if was_open:
                sink.close(ended=first.ended)
            return
        if isinstance(first, _Open):
            if self._is_open:
                self._is_open = False
                sink.close(ended=False)
            self._opening = first
            sink.open(run=first.run, step=first.step)
            self._is_open = True
            return
        reports = [item for item in items if not isinstance(item, _Open | _Close)]
        if not self._is_open and self._opening is not None:
            sink.open(run=self._opening.run, step=first.step)
            self._is_open = True
        sink.write(reports)

    def _failed(self, error: Exception) -> None:
        known, self._error, self._is_open = self._error, error, False
        if known is None:
            _log.warning(
                "%s is not accepting reports; up to %d reports are buffered until it does: %s: %s",
                self._name,
                self._limit,
                type(error).__name__,
                error,
            )

    def _passed_on(self, count: int) -> None:
        with self._changed:
            for _ in range(count):
                self._queue.popleft()
            caught_up = 2 * len(self._queue) < self._limit
            dropped, steps = (self._dropped, self._dropped_steps) if caught_up else (0, (0, 0))
            self._dropped -= dropped
        away, self._error = self._error is not None, None
        if dropped:
            _log.warning(
                "%s lacks %d reports of steps %d to %d, which were dropped because the buffer "
                "already held %d reports",
                self._name,
                dropped,
                *steps,
                self._limit,
            )
        elif away:
            _log.info("%s is accepting reports again", self._name)
