"""Recent history of jobs for the status page: loss, speed and ranks over time.

The history is kept in memory only, and its resolution decreases as a run gets longer; Prometheus
provides long-term storage. The event loop writes the history; other threads may read `points`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NoReturn

from shoal_coordinator.membership.model.observation import ObservedJob
from shoal_coordinator.membership.model.state import JobPhase, RunId

logger = logging.getLogger(__name__)

_INTERVAL_MS: Final = 1_000
_MOST: Final = 600
"""Maximum number of points per job. When it is reached, every second point is dropped and the
sampling interval doubles."""
_MOST_JOBS: Final = 1_000
"""Maximum number of jobs without members whose history is kept; the most recently finished jobs are
kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """State of a job at one moment: loss, speed and ranks."""

    unix_ms: int
    step: int
    loss: float
    """Mean of the losses last reported by the ranks; NaN if none was reported."""
    samples_per_s: float
    """Samples per second, summed across ranks."""
    ranks: int


class History:
    """Time series of one run."""

    def __init__(self, run: RunId) -> None:
        self.run = run
        self.points: list[Point] = []
        """Points, oldest first. Every change replaces the list, so that other threads can read it.
        The last point is always the newest."""
        self._interval_ms = _INTERVAL_MS

    def add(self, point: Point) -> None:
        """Adds a point. If the newest point so far is less than a sampling interval after the one
        before it, the new point replaces it."""
        kept = self.points
        if len(kept) >= 2 and kept[-1].unix_ms < kept[-2].unix_ms + self._interval_ms:
            kept = kept[:-1]
        if len(kept) >= _MOST:
            kept = kept[::2]
            self._interval_ms *= 2
        self.points = [*kept, point]


class Histories:
    """Histories of the newest run of each job, by job id."""

    def __init__(self, observed: Callable[[], Iterable[ObservedJob]]) -> None:
        self._observed = observed
        self._of: dict[str, History] = {}

    def of(self, job_id: str, run: RunId) -> list[Point]:
        """Returns the points of a job's run; empty if the history belongs to a different run. May
        be called from any thread."""
        history = self._of.get(job_id)
        return history.points if history is not None and history.run == run else []

    def look(self) -> None:
        """Records a point for each job with members or live servers, unless its run has
        finished."""
        jobs = {job.state.spec.job_id: job for job in self._observed()}
        for job_id in self._of.keys() - jobs.keys():
            del self._of[job_id]
        for job_id, job in jobs.items():
            if job.state.is_deserted or job.state.phase is JobPhase.FINISHED:
                continue
            history = self._of.get(job_id)
            if history is None or history.run != job.state.run:
                history = self._of[job_id] = History(job.state.run)
            history.add(_point(job))
        ended = [job_id for job_id in self._of if jobs[job_id].state.is_deserted]
        for job_id in sorted(ended, key=lambda job_id: self._of[job_id].points[-1].unix_ms)[
            :-_MOST_JOBS
        ]:
            del self._of[job_id]

    async def follow(self) -> NoReturn:
        """Records points once a second until cancelled."""
        while True:
            try:
                self.look()
            except Exception:  # an error in the display must not stop the coordinator
                logger.exception("could not record a point of the status page's history")
            await asyncio.sleep(_INTERVAL_MS / 1000)


def _point(job: ObservedJob) -> Point:
    ranks = () if job.state.generation is None or not job.trains else job.state.generation.ranks
    reports = [
        pulse.progress
        for rank in ranks
        if (pulse := job.pulses.members.get(rank.member_id)) is not None
    ]
    losses = [
        progress.loss for progress in reports if progress.step and math.isfinite(progress.loss)
    ]
    return Point(
        unix_ms=job.now.unix_ms,
        step=job.newest_step,
        loss=sum(losses) / len(losses) if losses else math.nan,
        samples_per_s=sum(progress.samples_per_s for progress in reports),
        ranks=len(ranks),
    )
