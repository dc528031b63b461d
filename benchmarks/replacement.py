"""T20: the time from SIGKILL of one worker until all ranks, including its replacement, have
committed a step together.

One run gives many samples, as in T1 (`kill_recovery`). In T1, recovery ends earlier: when the
survivors take steps again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks import plots
from benchmarks.errors import MeasurementError
from benchmarks.figures import quantile
from benchmarks.processes import Stage
from benchmarks.recovery import Recovery
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.systems import Start, start_shoal, start_torchrun
from benchmarks.workers.steplog import Commit, StepLogs
from benchmarks.workers.workload import Workload

WORKERS: Final = 3
TARGET_S: Final = 1.0
_WIDTH: Final = 400
_BATCH: Final = 32
_START_TIMEOUT_S: Final = 180
_RECOVERY_TIMEOUT_S: Final = 180


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One system under one set of settings."""

    name: str
    command: str
    start: Start
    has_target: bool = False


def _shoal(strategy: str, *, warm: bool) -> Candidate:
    more = () if strategy == "ddp" else ("--strategy", strategy)
    flags = ("--standalone", "--nproc-per-node", str(WORKERS), *(() if warm else ("--no-warm",)))
    return Candidate(
        name=f"shoal, {strategy}{'' if warm else ', fresh'}",
        command=" ".join(("shoal run", *flags, "-m benchmarks.workers.train_shoal", *more)),
        start=partial(start_shoal, restarts=True, warm=warm, more=more),
        has_target=warm,
    )


CANDIDATES: Final = (
    *(
        _shoal(strategy, warm=warm)
        for strategy in ("ddp", "zero2", "fsdp")
        for warm in (True, False)
    ),
    Candidate(
        name="torchrun, restart of all",
        command=f"torchrun --standalone --nproc-per-node {WORKERS} --max-restarts 1000000 -m "
        "benchmarks.workers.train_ddp",
        start=partial(start_torchrun, restarts=True),
    ),
)


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about 8 minutes."""
    kills = 2 if options.quick else 10
    measured = [(candidate, _row(candidate, kills)) for candidate in CANDIDATES]
    rows = [row for _, row in measured]
    plots.samples(
        options.output / "t20.png",
        rows,
        sample="pause_s",
        label="kill to a step at full strength, s",
    )
    judged = [
        f"{row.name} {_judged(row.samples['pause_s'])}"
        for candidate, row in measured
        if candidate.has_target
    ]
    return Table(
        key="t20",
        title="SIGKILL of 1 worker to a step at full strength",
        target=f"p50 <= {TARGET_S:g} s with a warm process",
        method=(
            f"{WORKERS} workers train a {_WIDTH}-wide perceptron, {_BATCH} samples per rank per "
            "step. When all workers have taken 20 steps together, one is killed; the next kill "
            "hits the next rank. The time ends when the same number of ranks, including a new "
            "process, has committed a step in a newer group. Fresh: with `--no-warm`. torchrun "
            "restarts all workers, which do not load a checkpoint in this test."
        ),
        columns=("kills", "p50 s", "max s"),
        rows=tuple(rows),
        verdict=f"Measured, p50: {'; '.join(judged)}.",
    )


def _row(candidate: Candidate, kills: int) -> Row:
    pauses: list[float] = []
    failure = ""
    try:
        _kill_and_time(candidate, kills, pauses)
    except MeasurementError as error:
        failure = str(error)
    cells = {"kills": str(len(pauses))}
    if pauses:
        cells |= {"p50 s": f"{quantile(pauses, 0.5):.2f}", "max s": f"{max(pauses):.2f}"}
    return Row(
        name=candidate.name,
        command=candidate.command,
        cells=cells,
        samples={"pause_s": pauses},
        failure=failure,
    )


def _kill_and_time(candidate: Candidate, kills: int, pauses: list[float]) -> None:
    with Stage() as stage:
        directory = stage.directory / "steps"
        directory.mkdir()
        workload = Workload(log=directory, ranks=WORKERS, width=_WIDTH, batch=_BATCH)
        system = candidate.start(stage, workload)
        logs = StepLogs(directory)
        for turn in range(kills):
            whole = Recovery(logs, workers=WORKERS, recovered=WORKERS, restarted=False)
            stage.wait_until(
                f"{candidate.name}: {WORKERS} workers stepping together",
                whole.settled,
                timeout_s=_START_TIMEOUT_S,
            )
            victims = [pid for pid in whole.members if system.may_kill(pid)]
            victim = victims[turn % len(victims)]
            strength = FullStrength(logs, before=whole.members, killed_ns=time.monotonic_ns())
            system.kill(victim)
            stage.wait_until(
                f"{candidate.name}: full strength", strength.reached, timeout_s=_RECOVERY_TIMEOUT_S
            )
            pauses.append(strength.pause_s)
            system.replace()


class FullStrength:
    """The recovery from one kill up to full strength: until all ranks, including at least one new
    process, take steps together again."""

    def __init__(self, logs: StepLogs, *, before: Sequence[int], killed_ns: int) -> None:
        """`before`: pids of the settled group. `killed_ns`: time of the kill (CLOCK_MONOTONIC)."""
        self._logs = logs
        self._before = frozenset(before)
        self._killed_ns = killed_ns
        self._reached_ns = 0

    def reached(self) -> bool:
        """Returns whether a group with as many processes as before, at least one of them new, has
        committed a step."""
        self._logs.read()
        groups: dict[int, dict[int, Commit]] = {}
        for pid, commits in self._logs.commits.items():
            for commit in commits:
                if commit.time_ns > self._killed_ns and commit.world_size == len(self._before):
                    groups.setdefault(commit.group, {}).setdefault(pid, commit)
        whole = [
            max(commit.time_ns for commit in firsts.values())
            for firsts in groups.values()
            if len(firsts) == len(self._before) and firsts.keys() != self._before
        ]
        self._reached_ns = min(whole, default=0)
        return bool(whole)

    @property
    def pause_s(self) -> float:
        """Seconds from the kill until all ranks had committed a step together."""
        return (self._reached_ns - self._killed_ns) / 1e9


def _judged(pauses: Sequence[float]) -> str:
    if not pauses:
        return "not measured"
    median = quantile(pauses, 0.5)
    return f"{median:.2f} s ({'reached' if median <= TARGET_S else 'not reached'})"
