"""Account of a launcher's run: its progress, one line per fault with the resulting pause, and the
final figures. Pure.

The account combines two sources: the commits of this machine's workers (`course`), and the
membership changes on all machines (`changes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from shoal_common.formats.tally import Tally

from shoal.launcher.report.changes import Change, Changes, JobEvent
from shoal.launcher.report.course import OUTLIES, Course, Point, Standstill

_SERVER_NS: Final = 2_000_000_000
"""Maximum time in nanoseconds between the report of a lost parameter server and the start of a
pause that is attributed to the loss."""
_SERVER_PATIENCE_NS: Final = 60_000_000_000
_IDLE_NS: Final = 1_000_000_000
"""Minimum duration in nanoseconds of a pause that may be attributed to a lost parameter server. It
must also exceed the duration of several steps."""


@dataclass(frozen=True, kw_only=True)
class Pause:
    """A period in which training paused, and its causes: membership changes, lost parameter servers
    or stalled steps."""

    standstill: Standstill
    changes: tuple[Change, ...]

    @property
    def text(self) -> str:
        """Description of the pause in one line, without a line break."""
        happened, still = "; ".join(change.text for change in self.changes), self.standstill
        line = f"{happened}: training paused for {still.seconds:.3f} s"
        sizes = [change.world_size for change in self.changes if change.world_size]
        if sizes:
            line += f" and continued from step {still.steps} with {_counted(sizes[-1], 'rank')}"
        return line + (f"; {_counted(still.undone, 'step')} repeated" if still.undone else "")

    @property
    def is_fault(self) -> bool:
        """True if the pause was caused by the loss of a member or a server."""
        return any(change.faults for change in self.changes)


@dataclass(frozen=True, kw_only=True)
class Status:
    """Current progress of a run."""

    steps: int
    steps_in_all: int
    """Total number of steps of the run; 0 if unknown."""
    left: timedelta | None
    """Estimated remaining time at the average speed so far, excluding pauses; None if unknown."""
    samples_per_s: float
    loss: float
    """Last reported loss; NaN if none was reported."""


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """Final figures of a run, for the time that this launcher took part in it."""

    steps: int
    """Number of committed steps, not counting steps that were undone."""
    last_step: int
    """Number of the last committed step. In a run resumed from a checkpoint it exceeds `steps`."""
    steps_in_all: int
    """Total number of steps of the run's loop; 0 if unknown."""
    samples: int
    """Number of samples in the committed steps of all ranks; 0 if the script distributes its
    samples itself."""
    seconds: float
    """Seconds between the run's first and last commit."""
    faults: int
    joins: int
    leaves: int
    pauses: tuple[Pause, ...]
    lost_s: float
    """Seconds lost to pauses and repeated steps. The loss caused by a pause is its duration minus
    the duration of a usual step."""
    loss: float
    """Last reported loss, averaged over the reporting workers; NaN if none was reported."""
    began_ns: int
    """Time of the first commit, by `time.monotonic_ns`, the clock that `points` uses too."""
    points: tuple[Point, ...]
    asynchronous: bool

    @property
    def samples_per_s(self) -> float:
        """Samples per second over the entire time, including pauses."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def paused_s(self) -> float:
        """Sum of all pauses in seconds."""
        return sum(pause.standstill.seconds for pause in self.pauses)

    @property
    def longest_pause_s(self) -> float:
        """Duration of the longest pause in seconds; 0 if there was none."""
        return max((pause.standstill.seconds for pause in self.pauses), default=0.0)


def figures_lines(figures: RunFigures) -> list[str]:
    """Returns the figures as human-readable lines: one line, and a second line if there were
    faults, pauses, joins or leaves. Empty if no steps were committed."""
    if not figures.steps:
        return []
    did = f"{_counted(figures.steps, 'step')}"
    if figures.last_step != figures.steps and not figures.asynchronous:
        did += f" (up to step {figures.last_step:,})"
    if figures.samples:
        did += f", {_counted(figures.samples, 'sample')}"
    rate = (
        f"{figures.samples_per_s:,.0f} samples/s"
        if figures.samples
        else f"{figures.steps / max(figures.seconds, 1e-9):,.1f} steps/s"
    )
    first = f"{did} in {figures.seconds:.1f} s: {rate}"
    if not math.isnan(figures.loss):
        first += f"; loss {figures.loss:.4g}"
    if not (figures.faults or figures.joins or figures.leaves or figures.pauses):
        return [f"{first}; no faults"]
    second = (
        f"{_counted(figures.faults, 'fault')}, {_counted(figures.joins, 'join')}, "
        f"{_counted(figures.leaves, 'leave')}: "
    )
    if figures.pauses:
        second += (
            f"{_counted(len(figures.pauses), 'pause')}, {figures.paused_s:.3f} s in all, "
            f"{figures.longest_pause_s:.3f} s the longest; "
        )
    else:
        second += "no pause; "
    return [first, second + f"{figures.lost_s:.3f} s lost"]


def stopped_line(figures: RunFigures, reason: str) -> str:
    """Returns a human-readable line about a run that was stopped on request."""
    where = f"{figures.last_step:,}" if figures.last_step else "0"
    if figures.steps_in_all and not figures.asynchronous:
        where += f" of {figures.steps_in_all:,}"
    return f"stopped at step {where}" + (f": {reason}" if reason else "")


def interrupted_line(figures: RunFigures) -> str:
    """Returns a human-readable line about an elastic run that was ended early by a signal."""
    where = f"{figures.last_step:,}"
    if figures.steps_in_all and not figures.asynchronous:
        where += f" of {figures.steps_in_all:,}"
    return (
        f"interrupted at step {where}; run the same command again, and a script that calls "
        "shoal.resume continues from its newest checkpoint"
    )


class RunAccount:
    """Account of one run. All times are by `time.monotonic_ns`."""

    def __init__(self) -> None:
        self.course = Course()
        self.changes = Changes()
        self.pauses: list[Pause] = []
        self._unreported: list[Change] = []
        """Membership changes that have not been matched with a pause yet."""
        self._unexplained: list[Standstill] = []
        """Pauses without a known cause."""
        self._servers: list[tuple[int, Change]] = []
        """Lost parameter servers and stalled steps, each with the time of its report."""
        self._asked_ns = 0

    def take(self, tallies: Mapping[str, Tally], now_ns: int, *, settle: bool = False) -> None:
        """Updates the account from the workers' tallies of their commits so far. `settle`: True if
        no further commits will follow."""
        self._unexplained += self.course.take(tallies, now_ns, settle=settle)

    def wants_events(self, now_ns: int) -> bool:
        """Returns whether to request events from the coordinator because a pause is unexplained.
        Returns True at most once a second."""
        if not self.course.has_begun or now_ns < self._asked_ns + _IDLE_NS:
            return False
        known, idle_ns = (
            self.changes.generation,
            max(_IDLE_NS, round(OUTLIES * self.course.usual_step_s * 1e9)),
        )
        return (
            self.course.generation > known
            or bool(self._unexplained)
            or now_ns > self.course.last_ns + idle_ns
        )

    def explain(
        self, events: Iterable[JobEvent], endings: Mapping[str, str], now_ns: int
    ) -> list[str]:
        """Adds events of the coordinator. Returns a human-readable line for each pause explained by
        them. `endings`: as in `Changes.take`."""
        self._asked_ns = now_ns
        for change in self.changes.take(events, endings):
            if change.generation:
                self._unreported.append(change)
            else:
                self._servers.append((now_ns, change))
        return self._lines(now_ns)

    def _lines(self, now_ns: int) -> list[str]:
        lines, kept = [], []
        for standstill in self._unexplained:
            changes = [
                change
                for change in self._unreported
                if standstill.before < change.generation <= standstill.generation
            ]
            self._unreported = [change for change in self._unreported if change not in changes]
            lost = [entry for entry in self._servers if _meet(entry[0], standstill)]
            self._servers = [entry for entry in self._servers if entry not in lost]
            changes += [change for _, change in lost]
            # the membership change is more informative
            changes = [change for change in changes if not change.stood] or changes
            if not changes and standstill.generation > max(
                standstill.before, self.changes.generation
            ):
                kept.append(standstill)  # the coordinator was unreachable
                continue
            if changes:
                self.pauses.append(Pause(standstill=standstill, changes=tuple(changes)))
                lines.append(self.pauses[-1].text)
        self._unexplained = kept
        self._servers = [
            entry for entry in self._servers if now_ns < entry[0] + _SERVER_PATIENCE_NS
        ]
        if (
            self.course.asynchronous
        ):  # asynchronous workers do not wait for each other, so there are no pauses
            lines += [f"{change.text}; the others continued" for change in self._unreported]
            self._unreported = []
        return lines

    @property
    def status(self) -> Status | None:
        """Current progress; None if no step has been committed."""
        course = self.course
        if not course.has_begun:
            return None
        recent = course.points[-5:]
        left = (
            max(0, course.steps_in_all - course.steps) * course.usual_step_s
            if course.steps_in_all and course.usual_step_s
            else None
        )
        return Status(
            steps=course.steps,
            steps_in_all=course.steps_in_all,
            left=None if left is None else timedelta(seconds=left),
            samples_per_s=sum(point.samples_per_s for point in recent) / len(recent)
            if recent
            else 0.0,
            loss=course.loss,
        )

    @property
    def figures(self) -> RunFigures:
        """Figures of the run so far."""
        course, usual_s = self.course, self.course.usual_step_s
        costs = [
            max(0.0, pause.standstill.seconds - usual_s) + pause.standstill.undone * usual_s
            for pause in self.pauses
        ]
        return RunFigures(
            steps=max(0, course.steps - course.steps_before),
            last_step=course.steps,
            steps_in_all=course.steps_in_all,
            samples=course.samples,
            seconds=course.seconds,
            faults=self.changes.faults,
            joins=self.changes.joins,
            leaves=self.changes.leaves,
            pauses=tuple(self.pauses),
            lost_s=sum(costs),
            loss=course.loss,
            began_ns=course.began_ns,
            points=tuple(course.points),
            asynchronous=course.asynchronous,
        )


def _meet(heard_ns: int, standstill: Standstill) -> bool:
    """Returns whether the loss of a parameter server may have caused a pause. `heard_ns`: time of
    the report, which may be later than the loss, but not earlier."""
    return (
        standstill.began_ns < heard_ns + _SERVER_NS and heard_ns < standstill.ended_ns + _SERVER_NS
    )


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
