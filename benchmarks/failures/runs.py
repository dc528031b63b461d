"""Measures one run of T17: one system and one model, with or without a schedule of faults."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from benchmarks.failures.account import Account, account, reached, reduced_s
from benchmarks.failures.injector import Injector
from benchmarks.failures.schedule import Fault
from benchmarks.failures.systems import Start
from benchmarks.processes import Stage
from benchmarks.workers.failures.ledger import Ledgers
from benchmarks.workers.failures.task import ABSENT, Task

LONGEST_S: Final = 240.0
"""Time limit of a run; half of it limits the launch. A system may make no progress between
faults."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Size of a run."""

    model: str
    ranks: int
    batch: int
    """Samples per rank per step."""
    steps: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """Measurements of one run. Unless noted otherwise, times are in seconds since all workers had
    taken their first step together."""

    time_s: float
    """Time until a worker had committed the last step."""
    progress: Sequence[tuple[float, int]]
    """Pairs (time, step) for all committed steps, including steps that were undone later."""
    absences: Sequence[tuple[float, float]]
    """Time of each kill, and the time from which a replacement could join."""
    missing_s: float
    """Missing capacity, expressed as a time: the total duration of all absences divided by the
    number of workers."""
    reduced_s: float
    """Total time during which not all workers took steps together."""
    account: Account
    saved_s: Sequence[float]
    """Duration of each checkpoint in seconds."""
    launch_s: float
    """Seconds from the start of the command until all workers had taken their first step
    together."""

    @property
    def step_s(self) -> float:
        """Median time of a step."""
        return statistics.median(
            after - before for (before, _), (after, _) in pairwise(self.progress)
        )

    @property
    def digest(self) -> str:
        """Digest of the final parameters; empty if the workers' digests differ."""
        return next(iter(self.account.digests)) if len(self.account.digests) == 1 else ""


def run(
    name: str,
    start: Start,
    extent: Extent,
    faults: Iterable[Fault] = (),
    *,
    longest_s: float = LONGEST_S,
) -> Run:
    """Performs a run under one system and measures it.

    Args:
        name: name of the system, used in errors.
        start: function that starts the system's workers.
        extent: size of the run.
        faults: faults to inject, in order.
        longest_s: maximum duration in seconds; at most half of it until the first common step.

    Raises:
        MeasurementError: the run failed or took too long.
    """
    with Stage() as stage:
        directory = stage.directory / "ledgers"
        directory.mkdir()
        task = Task(
            ledgers=directory,
            model=extent.model,
            ranks=extent.ranks,
            batch=extent.batch,
            steps=extent.steps,
        )
        ledgers = Ledgers(directory)
        started_ns = time.monotonic_ns()
        injector = Injector(
            start(stage, task),
            ledgers,
            absent=directory / ABSENT,
            faults=iter(faults),
            ranks=task.ranks,
            steps=task.steps,
        )
        stage.wait_until(
            f"{name}: a first step of all workers",
            lambda: injector.over() or injector.begun_ns > 0,
            timeout_s=longest_s / 2,
        )
        stage.wait_until(f"{name}: step {task.steps}", injector.over, timeout_s=longest_s)
        return _measured(injector, ledgers, task, started_ns)


def _measured(injector: Injector, ledgers: Ledgers, task: Task, started_ns: int) -> Run:
    entries = list(ledgers.of.values())
    begun_ns = injector.begun_ns
    progress = reached(entries)
    end_ns = next(time_ns for time_ns, step in reversed(progress) if step == task.steps)

    def since(time_ns: int) -> float:
        return (time_ns - begun_ns) / 1e9

    absences = [
        (since(kill), since(min(back, end_ns)))
        for kill, back in zip(injector.kills_ns, injector.returns_ns, strict=True)
        if kill < end_ns
    ]
    return Run(
        time_s=since(end_ns),
        progress=[
            (since(time_ns), step) for time_ns, step in progress if begun_ns <= time_ns <= end_ns
        ],
        absences=absences,
        missing_s=sum(back - kill for kill, back in absences) / task.ranks,
        reduced_s=reduced_s(entries, injector.kills_ns, ranks=task.ranks, end_ns=end_ns),
        account=account(entries, steps=task.steps, samples=task.samples),
        saved_s=[seconds for each in entries for seconds in each.saved_s],
        launch_s=(begun_ns - started_ns) / 1e9,
    )
