"""How far this worker is, for heartbeats and metrics.

Written by the training thread, read by the link's. A lock guards what one commit changes together; the other fields are single values.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_worker.metrics import WorkerMetrics

_WINDOW_S = 1.0
_MEDIAN_OF = 31


class ProgressMeter:
    """Counts steps, samples and entered collectives, and keeps rates over about the last second, or the last step if that took longer."""

    def __init__(self, metrics: WorkerMetrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds since anywhere."""
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._sequence = 0
        self._steps = 0
        self._samples = 0
        self._loss = math.nan
        self._staleness = 0.0
        self._recent: deque[tuple[float, int]] = deque()
        self._step_times: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._last_commit: float | None = None
        self.epoch = 0
        """The epoch of the loader in use; set by the session's owner."""

    def entered(self) -> None:
        """The training thread came to a border, a step or an operation: it is not stuck."""
        self._sequence += 1

    def told_loss(self, loss: float) -> None:
        """The loop told its loss."""
        self._loss = loss
        self._metrics.loss.set(loss)

    @property
    def staleness(self) -> float:
        """Of the last push."""
        return self._staleness

    def pushed(self, staleness: float) -> None:
        """A push was applied by the servers."""
        self._staleness = staleness
        self._metrics.staleness.observe(staleness)

    def committed(self, *, steps: int, samples: int, loss: float | None) -> None:
        """A step was committed; `samples` of it were this rank's."""
        now = self._clock()
        with self._lock:
            self._sequence += 1
            self._steps = steps
            self._samples += samples
            self._recent.append((now, samples))
            while len(self._recent) > 2 and self._recent[0][0] < now - _WINDOW_S:
                self._recent.popleft()
            last, self._last_commit = self._last_commit, now
            if last is not None:
                self._step_times.append(now - last)
        if last is not None:
            self._metrics.step_seconds.observe(now - last)
        self._metrics.steps_committed.inc()
        self._metrics.samples.inc(samples)
        if loss is not None:
            self.told_loss(loss)

    def message(self) -> pb.Progress:
        """A snapshot. While no step ends, the rate falls."""
        with self._lock:
            times, samples = list(self._step_times), [n for _, n in self._recent]
            since_last = self._clock() - self._recent[-1][0] if samples else 0.0
            span = max(self._recent[-1][0] - self._recent[0][0], since_last) if samples else 0.0
            return pb.Progress(
                step=self._steps,
                epoch=self.epoch,
                sequence=self._sequence,
                samples_per_s=sum(samples[1:]) / span if span > 0 else 0.0,
                loss=self._loss,
                step_time_s=statistics.median(times) if times else 0.0,
                samples=self._samples,
                staleness=self._staleness,
            )
