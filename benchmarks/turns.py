"""Measures the step times of several systems that take turns; shared by T2, T6 and T7.

All systems are started and kept running. In every round, each of them runs a block of steps, and
the order alternates between rounds. Ratios are computed round by round, so that anything that slows
the machine down for a while cancels out. This module does not depend on any particular system.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

import psutil

from benchmarks.errors import MeasurementError
from benchmarks.figures import paired_ratio, quantile
from benchmarks.gates import Gate
from benchmarks.processes import Stage
from benchmarks.report import Row
from benchmarks.systems import System
from benchmarks.workers.steplog import WARM_UP_STEPS
from benchmarks.workers.workload import Workload

_TIMEOUT_S: Final = 120


@dataclass(frozen=True, kw_only=True)
class Side:
    """One system of a comparison."""

    name: str
    command: str
    start: Callable[[Stage, Workload], System]


@dataclass(frozen=True, kw_only=True)
class Course:
    """Workload and extent of a comparison, the same for all sides."""

    ranks: int
    width: int
    batch: int
    """Samples per rank per step."""
    rounds: int
    steps_per_block: int
    warm_up_blocks: int
    """Number of blocks to run before the rounds, without recording them."""
    device: str = "cpu"
    """Device on which the workers compute."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of one system, by block, without warm-up blocks."""

    means_s: list[float]
    medians_s: list[float]
    cpu_s: list[float]
    """CPU time per step and rank, including the share of launcher and services."""
    steps_s: list[float]
    """Times of all steps of all ranks."""
    failure: str


@dataclass(kw_only=True)
class _Started:
    gate: Gate
    processes: Sequence[psutil.Process]
    """Workers, launcher and services."""
    blocks: list[list[list[float]]] = field(default_factory=list)
    """Step times in seconds, by block and rank."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU time of all processes together, in seconds, by block."""

    def run_block(self, steps: int) -> None:
        """Runs a block of steps and records its times. Raises MeasurementError."""
        before = self._cpu_s()
        self.blocks.append(self.gate.block(steps))
        self.cpu_s.append(self._cpu_s() - before)

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in self.processes]
        return sum(t.user + t.system for t in times)


def take_turns(sides: Sequence[Side], course: Course) -> dict[str, Outcome]:
    """Runs all rounds and returns the outcome of each side by its name. A side that fails takes no
    part in later rounds; its outcome contains the reason."""
    started: dict[str, _Started] = {}
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        for side in sides:
            try:
                started[side.name] = stack.enter_context(_starting(side, course))
            except MeasurementError as error:
                failures[side.name] = str(error)
        for number in range(course.warm_up_blocks + course.rounds):
            running = [name for name in started if name not in failures]
            for name in running if number % 2 else reversed(running):
                try:
                    started[name].run_block(course.steps_per_block)
                except (MeasurementError, psutil.Error) as error:
                    failures[name] = str(error)
    return {
        side.name: _outcome(started.get(side.name), course, failures.get(side.name, ""))
        for side in sides
    }


def row(
    outcome: Outcome,
    *,
    name: str,
    command: str,
    over: Outcome | None = None,
    under: Outcome | None = None,
) -> Row:
    """Returns a system's row, with up to two ratios that are computed round by round.

    `over`: system whose step times this system's are divided by. `under`: system whose step times
    are divided by this system's.
    """
    if not outcome.means_s:
        return Row(name=name, command=command, cells={}, failure=outcome.failure)
    cells = {
        "step ms": f"{statistics.median(outcome.means_s) * 1e3:.2f}",
        "p99 ms": f"{quantile(outcome.steps_s, 0.99) * 1e3:.2f}",
        "CPU ms": f"{statistics.fmean(outcome.cpu_s) * 1e3:.2f}",
    }
    samples = {"step_s": outcome.means_s, "cpu_s": outcome.cpu_s}
    above, below = (outcome, over) if over is not None else (under, outcome)
    if above is not None and below is not None and len(above.means_s) == len(below.means_s):
        cells["ratio of means"] = str(paired_ratio(above.means_s, below.means_s))
        cells["ratio of medians"] = str(paired_ratio(above.medians_s, below.medians_s))
        samples["ratio"] = [a / b for a, b in zip(above.means_s, below.means_s, strict=True)]
    return Row(name=name, command=command, cells=cells, samples=samples, failure=outcome.failure)


COLUMNS: Final = ("step ms", "p99 ms", "CPU ms", "ratio of means", "ratio of medians")
"""Columns of the rows."""


@contextmanager
def _starting(side: Side, course: Course) -> Iterator[_Started]:
    with Stage() as stage:
        directory = stage.directory / "steps"
        directory.mkdir()
        socket = stage.directory / "gate"
        with Gate(socket, ranks=course.ranks, timeout_s=_TIMEOUT_S) as gate:
            workload = Workload(
                log=directory,
                ranks=course.ranks,
                width=course.width,
                batch=course.batch,
                device=course.device,
                gate=socket,
            )
            side.start(stage, workload)
            stage.wait_until(
                f"{side.name}: first steps of {course.ranks} workers",
                gate.complete,
                timeout_s=_TIMEOUT_S,
            )
            yield _Started(gate=gate, processes=stage.processes())
            gate.dismiss()


def _outcome(started: _Started | None, course: Course, failure: str) -> Outcome:
    blocks = started.blocks[course.warm_up_blocks :] if started is not None else []
    cpu_s = started.cpu_s[course.warm_up_blocks :] if started is not None else []
    flat = [list(itertools.chain(*block)) for block in blocks]
    per_rank = course.steps_per_block + WARM_UP_STEPS
    return Outcome(
        means_s=[statistics.fmean(steps) for steps in flat],
        medians_s=[statistics.median(steps) for steps in flat],
        cpu_s=[
            total / (len(block) * per_rank) for total, block in zip(cpu_s, blocks, strict=False)
        ],
        steps_s=list(itertools.chain(*flat)),
        failure=failure,
    )
