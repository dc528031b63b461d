"""Measures one run of T17: one system, one model, with a schedule of faults or without."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.failures.account import Account, account, reached, reduced_s
from benchmarks.failures.injector import Injector
from benchmarks.failures.schedule import Schedule
from benchmarks.failures.systems import Start
from benchmarks.processes import Stage
from benchmarks.workers.failures.ledger import Ledgers
from benchmarks.workers.failures.task import ABSENT, Task

LONGEST_S = 240.0
"""Limit of a run: a system may make no progress between faults."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Size of a run."""

    model: str
    ranks: int
    batch: int
    """Samples per rank and step."""
    steps: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run. Times count from the moment when all workers had taken their first step together."""

    time_s: float
    """Until anybody had committed the last step."""
    progress: Sequence[tuple[float, int]]
    """Times and steps, steps that were undone included."""
    absences: Sequence[tuple[float, float]]
    """Kill of a worker, and when its replacement might join."""
    missing_s: float
    """Capacity that was really missing: the absences, as shares of the workers."""
    reduced_s: float
    """Time in which not all workers took steps together."""
    account: Account
    saved_s: Sequence[float]
    """Seconds that each checkpoint took."""

    @property
    def step_s(self) -> float:
        """Median time of a step."""
        return statistics.median(
            after - before for (before, _), (after, _) in pairwise(self.progress)
        )

    @property
    def digest(self) -> str:
        """Digest of the final parameters; empty if the workers' differ."""
        return next(iter(self.account.digests)) if len(self.account.digests) == 1 else ""


def run(name: str, start: Start, extent: Extent, schedule: Schedule | None) -> Run:
    """Runs it to the end. Raises MeasurementError.

    Args:
        name: of the system, for errors.
        start: starts the workers.
        extent: size of the run.
        schedule: faults; None: none.
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
        injector = Injector(
            start(stage, task),
            ledgers,
            absent=directory / ABSENT,
            faults=schedule.faults() if schedule is not None else iter(()),
            ranks=task.ranks,
            steps=task.steps,
        )
        stage.wait_until(f"{name}: step {task.steps}", injector.over, timeout_s=LONGEST_S)
        return _measured(injector, ledgers, task)


def _measured(injector: Injector, ledgers: Ledgers, task: Task) -> Run:
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
    )
