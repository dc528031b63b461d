"""Course of a run, derived from its workers' commits: steps, speed, loss, and pauses. Pure.

The input is the tallies of this launcher's workers (`shoal_common.formats.tally`). Each call
receives all of them again, including those of dead workers. Training *pauses* from the last commit
before a membership change to the first commit after it. Any other time without a commit is a pause
if it lasts at least half a second and several times as long as a usual step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shoal_common.formats.tally import LONG_GAP_NS, Span, Tally

_SETTLE_NS: Final = 300_000_000
"""Delay in nanoseconds between the end of a gap and its report. After this delay, all workers'
commits since the gap have been read."""
OUTLIES: Final = 4
"""A gap counts as a pause if it is at least this many times as long as a usual step."""
_MOST_POINTS: Final = 2_000
"""Maximum number of points. When it is reached, neighboring points are merged and the sampling rate
is halved."""


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """Period in which no step was committed."""

    began_ns: int
    ended_ns: int
    before: int
    """Generation of the last commit before the period."""
    generation: int
    """Generation of the first commit after the period; the same as `before` if the membership did
    not change."""
    steps: int
    """Number of committed steps when training continued."""
    undone: int = 0
    """Number of steps that were committed before the period and repeated afterwards."""

    @property
    def seconds(self) -> float:
        """Duration of the period in seconds."""
        return (self.ended_ns - self.began_ns) / 1e9


@dataclass(frozen=True, kw_only=True)
class Point:
    """State of the run at the end of a short interval."""

    at_ns: int
    """Time of the end of the interval."""
    steps: int
    """Number of steps of the run at the end of the interval, including steps before this launcher
    took part."""
    samples: int
    samples_per_s: float
    loss: float
    """Mean of the losses reported in the interval; NaN if no finite loss was reported."""
    loss_count: int = 0
    """Number of losses averaged in `loss`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other metrics reported by the workers, by name: the mean of the workers' last values."""


class Course:
    """Course of one run. All times are by `time.monotonic_ns`."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        """Points of the run, oldest first."""
        self.standstills: list[Standstill] = []
        """Pauses that have ended, oldest first."""
        self.generation = 0
        """Newest generation with a committed step."""
        self._tallies: dict[str, Tally] = {}
        self._pending: dict[str, list[Span]] = {}
        """Worker -> unsettled spans: at most the newest span of each worker."""
        self._seen: dict[str, int] = {}
        """Number of processed spans per worker, excluding the newest span."""
        self._until: Span | None = None
        """Latest settled commit, represented by the span that ends with it."""
        self._began: tuple[int, int, int] | None = None
        """Time of the first commit, and the run's numbers of steps and samples before it."""
        self._took: tuple[int, int, float, int] | None = None
        """State at the last point: time, samples, sum of the losses, and number of losses."""
        self._per_point = 1
        self._skipped = 0

    # -------------------------------------------------------------------------------------- figures

    @property
    def has_begun(self) -> bool:
        """True if a step has been committed."""
        return bool(self._tallies)

    @property
    def asynchronous(self) -> bool:
        """True if each worker takes its own steps, independently of the others."""
        return any(tally.counts.asynchronous for tally in self._tallies.values())

    @property
    def strategy(self) -> str:
        """Name of the strategy that the workers use; empty if unknown."""
        return next((tally.strategy for tally in self._tallies.values() if tally.strategy), "")

    def last_of(self, name: str) -> Tally | None:
        """Returns the last tally of a worker; None if the worker has not committed anything."""
        return self._tallies.get(name)

    @property
    def steps_before(self) -> int:
        """Number of the run's steps before this launcher took part, e.g. from a checkpoint or from
        other machines."""
        return 0 if self.asynchronous or self._began is None else self._began[1]

    @property
    def steps(self) -> int:
        """Number of committed steps of the run, not counting steps that were undone. In
        asynchronous training, the number of steps of this launcher's workers."""
        if self.asynchronous:
            pushed = sum(tally.own_steps for tally in self._tallies.values())
            return pushed + sum(steps for steps, _ in self._left_behind.values())
        return self._newest.steps if self._tallies else 0

    @property
    def samples(self) -> int:
        """Number of samples in the steps since `steps_before`; 0 if the script distributes its
        samples itself."""
        if self.asynchronous:
            pushed = sum(tally.own_samples for tally in self._tallies.values())
            return pushed + sum(samples for _, samples in self._left_behind.values())
        return (
            max(0, self._newest.counts.samples - self._began[2]) if self._began is not None else 0
        )

    @property
    def _left_behind(self) -> dict[int, tuple[int, int]]:
        """Steps and samples of batches that a worker pushed to the parameter servers but did not
        count, because it died. Only batches that another worker found on the servers are included.
        The keys are the tallies' batch keys."""
        in_doubt = {tally.in_doubt for tally in self._tallies.values()}
        return {
            key: each
            for tally in self._tallies.values()
            for key, each in tally.known.items()
            if key in in_doubt
        }

    @property
    def steps_in_all(self) -> int:
        """Total number of steps of the run; 0 if unknown."""
        if self.asynchronous:
            return max(tally.counts.steps_in_all for tally in self._tallies.values())
        return self._newest.counts.steps_in_all if self._tallies else 0

    @property
    def loss(self) -> float:
        """Mean of the last losses reported by the current workers (those in the newest generation);
        NaN if none was reported."""
        if not self._tallies:
            return math.nan
        losses = [
            t.counts.loss for t in self._current if t.counts.losses or not math.isnan(t.counts.loss)
        ]
        return sum(losses) / len(losses) if losses else math.nan

    @property
    def metrics(self) -> dict[str, float]:
        """Mean of each other metric over the current workers that report it, by name."""
        reported: dict[str, list[float]] = {}
        for tally in self._current:
            for name, value in tally.metrics.items():
                reported.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in reported.items()}

    @property
    def _current(self) -> list[Tally]:
        """Tallies of the workers that have committed a step in the newest generation. In
        asynchronous training, the tallies of all workers."""
        newest = self._newest.spans[-1]
        return [
            tally
            for tally in self._tallies.values()
            if tally.spans[-1].generation == newest.generation or tally.counts.asynchronous
        ]

    @property
    def seconds(self) -> float:
        """Seconds between the run's first and last commit."""
        return (self._newest.spans[-1].last_ns - self.began_ns) / 1e9 if self._tallies else 0.0

    @property
    def usual_step_s(self) -> float:
        """Seconds per step, excluding pauses; 0 if unknown."""
        moved, intervals = self._moved
        return max(0.0, moved) / intervals if intervals > 0 else 0.0

    @property
    def _moved(self) -> tuple[float, int]:
        """Seconds outside of pauses, and the number of intervals between commits in that time."""
        moved = self.seconds - sum(standstill.seconds for standstill in self.standstills)
        undone = sum(standstill.undone for standstill in self.standstills)
        return moved, self.steps - self.steps_before - 1 + undone - len(self.standstills)

    def _is_long(self, apart_ns: int) -> bool:
        """Returns whether the time between two commits is much longer than the mean time between
        the other commits."""
        moved, intervals = self._moved
        if apart_ns < LONG_GAP_NS or intervals < 2:
            return False
        return apart_ns > OUTLIES * 1e9 * max(0.0, moved - apart_ns / 1e9) / (intervals - 1)

    @property
    def began_ns(self) -> int:
        """Time of the first commit; 0 if there was none."""
        return self._began[0] if self._began is not None else 0

    @property
    def last_ns(self) -> int:
        """Time of the last commit; 0 if there was none."""
        return self._newest.spans[-1].last_ns if self._tallies else 0

    # ---------------------------------------------------------------------------------------- input

    def take(
        self, tallies: Mapping[str, Tally], now_ns: int, *, settle: bool = False
    ) -> list[Standstill]:
        """Updates the course from the workers' tallies of their commits so far, and returns the
        pauses that have been detected since the last call. `settle`: True if no further commits
        will follow."""
        if not tallies:
            return []
        self._tallies.update(tallies)
        for name, tally in tallies.items():
            self._take_spans(name, tally)
        self.generation = max(tally.spans[-1].generation for tally in self._tallies.values())
        found = self._find_standstills(now_ns if settle else now_ns - _SETTLE_NS)
        self.standstills += found
        self._add_point(now_ns)
        if settle and self.points:  # metrics may have been reported after the last step
            self.points[-1] = dataclasses.replace(self.points[-1], metrics=self.metrics)
        return found

    def _take_spans(self, name: str, tally: Tally) -> None:
        if name not in self._seen:
            began = (
                tally.spans[0].first_ns,
                tally.counts.steps_before,
                tally.counts.samples_before,
            )
            self._began = min(self._began or began, began)
        seen, pending = self._seen.get(name, 0), self._pending.setdefault(name, [])
        if pending and pending[-1].first_ns == tally.spans[-1].first_ns:
            pending[-1] = tally.spans[-1]  # the same span, which has continued
            return
        if pending and seen >= tally.spans_before:
            pending.pop()  # the span was read before it had ended
        pending += tally.spans[max(0, seen - tally.spans_before) :]
        self._seen[name] = tally.spans_before + len(tally.spans) - 1

    def _find_standstills(self, horizon_ns: int) -> list[Standstill]:
        found = []
        spans = sorted(
            (span for pending in self._pending.values() for span in pending),
            key=lambda span: (span.first_ns, span.last_ns),
        )
        for span in spans:
            if span.first_ns > horizon_ns:
                break
            until = self._until
            if until is None:
                self._until = span
                continue
            apart = span.first_ns - until.last_ns
            # asynchronous workers do not wait for each other
            changed = span.generation != until.generation and not self.asynchronous
            if self._is_long(apart) or (apart > 0 and changed):
                found.append(self._standstill(until, span))
            if span.last_ns >= until.last_ns:
                self._until = span
        if self._until is not None:
            for name, pending in self._pending.items():
                self._pending[name] = [
                    span for span in pending[:-1] if span.first_ns > horizon_ns
                ] + pending[-1:]
        return found

    def _standstill(self, before: Span, after: Span) -> Standstill:
        steps, done = after.began_after, before.steps
        if after.generation != before.generation:
            # A rank with a step in doubt commits it in the new generation, after the other ranks
            # have committed it.
            begun = [
                [span for span in spans if span.first_ns >= after.first_ns]
                for spans in self._pending.values()
            ]
            steps = max(
                spans[0].began_after
                for spans in begun
                if spans and spans[0].generation == after.generation
            )
            ended = [
                span
                for spans in self._pending.values()
                for span in spans
                if span.last_ns <= before.last_ns
            ]
            done = max(
                (span.steps for span in ended if span.generation == before.generation),
                default=before.steps,
            )
        return Standstill(
            began_ns=before.last_ns,
            ended_ns=after.first_ns,
            before=before.generation,
            generation=after.generation,
            steps=steps,
            undone=max(0, done - steps),
        )

    def _add_point(self, now_ns: int) -> None:
        losses = sum(tally.counts.losses for tally in self._tallies.values())
        loss_sum = sum(tally.counts.loss_sum for tally in self._tallies.values())
        if self._took is None:
            self._took = (self.began_ns, 0, 0.0, 0)
        self._skipped += 1
        then_ns, then_samples, then_sum, then_losses = self._took
        if self._skipped < self._per_point or now_ns <= then_ns:
            return
        samples, reported = self.samples, losses - then_losses
        self._skipped, self._took = 0, (now_ns, samples, loss_sum, losses)
        self.points.append(
            Point(
                at_ns=now_ns,
                steps=self.steps,
                samples=samples,
                samples_per_s=max(0, samples - then_samples) / ((now_ns - then_ns) / 1e9),
                loss=(loss_sum - then_sum) / reported if reported > 0 else math.nan,
                loss_count=reported,
                metrics=self.metrics,
            )
        )
        if len(self.points) >= _MOST_POINTS:
            self.points = [
                _joined(*self.points[at : at + 2]) for at in range(0, len(self.points) - 1, 2)
            ]
            self._per_point *= 2

    @property
    def _newest(self) -> Tally:
        return max(self._tallies.values(), key=lambda tally: (tally.spans[-1].last_ns, tally.steps))


def until_last_commit(points: Sequence[Point], last_ns: int) -> list[Point]:
    """Returns the points up to the time of the last commit, `last_ns`. Points after it are merged
    into the last one, so that metrics reported after the last commit are kept."""
    before = [point for point in points if point.at_ns < last_ns]
    after = points[len(before) :]
    if not after:
        return before
    last = dataclasses.replace(
        functools.reduce(_joined, after), at_ns=last_ns, samples_per_s=after[0].samples_per_s
    )
    return [*before, last]


def history_of(
    course: Course, *, ranks: int, now_ns: int, now_unix_ms: int
) -> list[list[float | None]]:
    """Returns the course as points of the status page: [unix_ms, step, loss, samples_per_s, ranks].
    The first point is the start of the run.

    `ranks`: number of ranks. `now_ns`, `now_unix_ms`: the current time by `time.monotonic_ns`, and
    in milliseconds since the Unix epoch.
    """

    def unix_ms(at_ns: int) -> int:
        return now_unix_ms - (now_ns - at_ns) // 1_000_000

    if not course.has_begun:
        return []
    return [
        [unix_ms(course.began_ns) - 1, course.steps_before, None, None, ranks],
        *(
            [
                unix_ms(point.at_ns),
                point.steps,
                None if math.isnan(point.loss) else point.loss,
                point.samples_per_s,
                ranks,
            ]
            for point in until_last_commit(course.points, course.last_ns)
        ),
    ]


def _joined(first: Point, second: Point) -> Point:
    reported = first.loss_count + second.loss_count
    whole = [point for point in (first, second) if point.loss_count]
    return Point(
        at_ns=second.at_ns,
        steps=second.steps,
        samples=second.samples,
        samples_per_s=(first.samples_per_s + second.samples_per_s) / 2,
        loss=sum(point.loss * point.loss_count for point in whole) / reported
        if reported
        else math.nan,
        loss_count=reported,
        metrics=second.metrics,
    )
