"""What a launcher tells of its run: a line for each fault with its pause, how far the run is, and
the figures at the end. Pure.

Two sources are put together: what the workers of this machine commit (`course`), and who came and
went, on all machines (`changes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from shoal_common.tally import Tally

from shoal.launcher.changes import Change, Changes, JobEvent
from shoal.launcher.course import OUTLIES, Course, Point, Standstill

_SERVER_NS: Final = 2_000_000_000
"""A standstill that begins so soon after a parameter server's loss was heard of is by that loss."""
_SERVER_PATIENCE_NS: Final = 60_000_000_000
_IDLE_NS: Final = 1_000_000_000
"""No step for so long, and for as long as some steps take: perhaps a parameter server is gone."""


@dataclass(frozen=True, kw_only=True)
class Pause:
    """A standstill by people or faults: who came or went, or why a step stood, and how long no step
    was committed."""

    standstill: Standstill
    changes: tuple[Change, ...]

    @property
    def text(self) -> str:
        """One line without an end."""
        happened, still = "; ".join(change.text for change in self.changes), self.standstill
        line = f"{happened}: training stood still for {still.seconds:.3f} s"
        sizes = [change.world_size for change in self.changes if change.world_size]
        if sizes:
            line += f" and went on from step {still.steps} with {_counted(sizes[-1], 'rank')}"
        return line + (
            f"; {_counted(still.undone, 'step')} from there on had been taken before"
            if still.undone
            else ""
        )

    @property
    def is_fault(self) -> bool:
        """Somebody was lost."""
        return any(change.faults for change in self.changes)


@dataclass(frozen=True, kw_only=True)
class Status:
    """How far a run is."""

    steps: int
    steps_in_all: int
    """0: not known."""
    left: timedelta | None
    """Time left at the pace so far, without the pauses; None: not known."""
    samples_per_s: float
    loss: float
    """NaN: none was told."""


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What a run came to, as far as this launcher took part in it."""

    steps: int
    """Committed steps that stand."""
    last_step: int
    """Number of the last one; more than `steps` in a run that goes on from a checkpoint."""
    samples: int
    """Samples of those steps, over all ranks; 0: the script deals its samples itself."""
    seconds: float
    """Seconds between the run's first commit and its last one."""
    faults: int
    joins: int
    leaves: int
    pauses: tuple[Pause, ...]
    lost_s: float
    """What pauses and steps taken twice have cost: of each pause what is more than a usual step."""
    loss: float
    """Told last, the mean over the workers that told it; NaN: none was."""
    began_ns: int
    """Moment of the first commit, by `time.monotonic_ns`, as those of the points are."""
    points: tuple[Point, ...]
    asynchronous: bool

    @property
    def samples_per_s(self) -> float:
        """Over the whole time, pauses included."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def paused_s(self) -> float:
        """The sum of all pauses."""
        return sum(pause.standstill.seconds for pause in self.pauses)

    @property
    def longest_pause_s(self) -> float:
        """0: there was none."""
        return max((pause.standstill.seconds for pause in self.pauses), default=0.0)


def figures_lines(figures: RunFigures) -> list[str]:
    """A line for people, and where something happened a second one; none of a run that has
    committed nothing."""
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


class RunAccount:
    """See the module. Times are those of `time.monotonic_ns`."""

    def __init__(self) -> None:
        self.course = Course()
        self.changes = Changes()
        self.pauses: list[Pause] = []
        self._untold: list[Change] = []
        """Changes of the ranks whose pause is not known yet."""
        self._standing: list[Standstill] = []
        """Standstills of which nobody has said yet what they are by."""
        self._servers: list[tuple[int, Change]] = []
        """Parameter servers that were lost, and steps that stood, with the moment in which that was
        heard."""
        self._asked_ns = 0

    def take(self, tallies: Mapping[str, Tally], now_ns: int, *, settle: bool = False) -> None:
        """What the workers have committed by now. `settle`: nothing more comes."""
        self._standing += self.course.take(tallies, now_ns, settle=settle)

    def wants_events(self, now_ns: int) -> bool:
        """Something has happened that the coordinator can explain. Not said twice within a
        second."""
        if not self.course.has_begun or now_ns < self._asked_ns + _IDLE_NS:
            return False
        known, idle_ns = (
            self.changes.generation,
            max(_IDLE_NS, round(OUTLIES * self.course.usual_step_s * 1e9)),
        )
        return (
            self.course.generation > known
            or bool(self._standing)
            or now_ns > self.course.last_ns + idle_ns
        )

    def explain(
        self, events: Iterable[JobEvent], endings: Mapping[str, str], now_ns: int
    ) -> list[str]:
        """Takes up what the coordinator tells. Returns lines for people. `endings`: see
        `Changes.take`."""
        self._asked_ns = now_ns
        for change in self.changes.take(events, endings):
            if change.generation:
                self._untold.append(change)
            else:
                self._servers.append((now_ns, change))
        return self._lines(now_ns)

    def _lines(self, now_ns: int) -> list[str]:
        lines, kept = [], []
        for standstill in self._standing:
            changes = [
                change
                for change in self._untold
                if standstill.before < change.generation <= standstill.generation
            ]
            self._untold = [change for change in self._untold if change not in changes]
            lost = [entry for entry in self._servers if _meet(entry[0], standstill)]
            self._servers = [entry for entry in self._servers if entry not in lost]
            changes += [change for _, change in lost]
            # what happened says more
            changes = [change for change in changes if not change.stood] or changes
            if not changes and standstill.generation > max(
                standstill.before, self.changes.generation
            ):
                kept.append(standstill)  # the coordinator was away
                continue
            if changes:
                self.pauses.append(Pause(standstill=standstill, changes=tuple(changes)))
                lines.append(self.pauses[-1].text)
        self._standing = kept
        self._servers = [
            entry for entry in self._servers if now_ns < entry[0] + _SERVER_PATIENCE_NS
        ]
        if self.course.asynchronous:  # the others do not wait
            lines += [f"{change.text}: the others went on meanwhile" for change in self._untold]
            self._untold = []
        return lines

    @property
    def status(self) -> Status | None:
        """How far the run is now; None: no step was committed."""
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
        """What the run has come to by now."""
        course, usual_s = self.course, self.course.usual_step_s
        costs = [
            max(0.0, pause.standstill.seconds - usual_s) + pause.standstill.undone * usual_s
            for pause in self.pauses
        ]
        return RunFigures(
            steps=max(0, course.steps - course.steps_before),
            last_step=course.steps,
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
    """Whether a parameter server whose loss was heard of then may be what a standstill is by. It is
    heard of late, never early."""
    return (
        standstill.began_ns < heard_ns + _SERVER_NS and heard_ns < standstill.ended_ns + _SERVER_NS
    )


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
