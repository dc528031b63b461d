"""How far this worker is, for heartbeats and metrics. Written by the training thread; the link's thread only reads whole messages."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque

from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_worker.metrics import WorkerMetrics

_WINDOW_S = 1.0
_MEDIAN_OF = 31


class ProgressMeter:
    """Counts steps, samples and entered collectives, and keeps rates over about the last second."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
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

    def pushed(self, staleness: float) -> None:
        """A push was applied by the servers."""
        self._staleness = staleness
        self._metrics.staleness.observe(staleness)

    def committed(self, *, steps: int, samples: int, loss: float | None) -> None:
        """A step was committed; `samples` of it were this rank's."""
        now = time.monotonic()
        self._sequence += 1
        self._steps = steps
        self._samples += samples
        self._recent.append((now, samples))
        while self._recent and self._recent[0][0] < now - _WINDOW_S:
            self._recent.popleft()
        if self._last_commit is not None:
            self._step_times.append(now - self._last_commit)
            self._metrics.step_seconds.observe(now - self._last_commit)
        self._last_commit = now
        self._metrics.steps_committed.inc()
        self._metrics.samples.inc(samples)
        if loss is not None:
            self.told_loss(loss)

    def message(self) -> pb.Progress:
        """A snapshot."""
        span = max(_WINDOW_S, 1e-3) if len(self._recent) < 2 else max(self._recent[-1][0] - self._recent[0][0], 1e-3)
        counted = sum(n for _, n in list(self._recent)[1:]) if len(self._recent) > 1 else sum(n for _, n in self._recent)
        return pb.Progress(
            step=self._steps,
            epoch=self.epoch,
            sequence=self._sequence,
            samples_per_s=counted / span,
            loss=self._loss,
            step_time_s=statistics.median(self._step_times) if self._step_times else 0.0,
            samples=self._samples,
            staleness=self._staleness,
        )
