"""T14: from the start of the command to the end of the first training step, `shoal run` against torchrun, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks import plots
from benchmarks.errors import MeasurementError
from benchmarks.figures import ratio_of_medians
from benchmarks.processes import Stage
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.systems import WithLauncher, start_shoal, start_torchrun
from benchmarks.workers.steplog import StepLogs
from benchmarks.workers.workload import Workload

TARGET: Final = 1.1
RANKS: Final = 2
_WIDTH: Final = 400
_BATCH: Final = 32
_TIMEOUT_S: Final = 120


@dataclass(kw_only=True)
class Side:
    """One launcher and its times."""

    name: str
    command: str
    start: Callable[[Stage, Workload], WithLauncher]
    first_step_s: list[float] = field(default_factory=list)
    """From the command's start until all ranks have done a step."""
    exit_s: list[float] = field(default_factory=list)
    """Until the command has ended, its workers having left after that step."""
    failure: str = ""


def measure(options: Options) -> Table:
    """See the module. About 2 minutes."""
    rounds = 4 if options.quick else 10
    theirs = Side(name="torchrun", command="torchrun --standalone --nproc-per-node 2 -m benchmarks.workers.train_ddp", start=start_torchrun)
    ours = Side(name="shoal", command="shoal run --standalone --nproc-per-node 2 -m benchmarks.workers.train_shoal", start=start_shoal)
    sides = [theirs, ours]
    for number in range(-1, rounds):
        if any(side.failure for side in sides):
            break
        for side in sides if number % 2 else reversed(sides):
            _launch(side, counted=number >= 0)
    rows = [_row(side) for side in sides]
    verdict = "Not measured."
    if ours.first_step_s and len(ours.first_step_s) == len(theirs.first_step_s):
        first, whole = (ratio_of_medians(a, b) for a, b in ((ours.first_step_s, theirs.first_step_s), (ours.exit_s, theirs.exit_s)))
        rows[1] = _row(ours, {"ratio": str(first), "ratio to the exit": str(whole)})
        verdict = f"Measured: {first.value:.3f} x ({'reached' if first.value <= TARGET else 'not reached'})."
    plots.samples(options.output / "t14.png", rows, sample="first_step_s", label="command to first step, s")
    return Table(
        key="t14",
        title=f"From the command to the first step of {RANKS} ranks",
        target=f"<= {TARGET} x torchrun",
        method=(
            f"Both launch {RANKS} workers on this machine with the same model and data, which leave after one step; {rounds} rounds, in "
            "turns whose order alternates, after one that is not counted. The time runs from the start of the command until the last rank "
            "has done its first step; `shoal run` starts Valkey and the coordinator meanwhile. The ratio is that of the medians, with its "
            "95 % confidence interval (bootstrap over rounds)."
        ),
        columns=("rounds", "first step s", "exit s", "ratio", "ratio to the exit"),
        rows=tuple(rows),
        verdict=verdict,
    )


def _launch(side: Side, *, counted: bool) -> None:
    with Stage() as stage:
        directory = stage.directory / "steps"
        directory.mkdir()
        workload = Workload(log=directory, ranks=RANKS, width=_WIDTH, batch=_BATCH, steps=1)
        started = time.monotonic_ns()
        try:
            stage.finish(side.start(stage, workload).process, timeout_s=_TIMEOUT_S)
        except MeasurementError as error:
            side.failure = str(error)
            return
        ended = time.monotonic_ns()
        logs = StepLogs(directory)
        logs.read()
        steps = [commits[0].time_ns for commits in logs.commits.values() if commits]
        if len(steps) != RANKS:
            side.failure = f"{len(steps)} of {RANKS} ranks did a step\n{stage.outputs()}"
        elif counted:
            side.first_step_s.append((max(steps) - started) / 1e9)
            side.exit_s.append((ended - started) / 1e9)


def _row(side: Side, ratios: dict[str, str] | None = None) -> Row:
    cells = {"rounds": str(len(side.first_step_s))}
    if side.first_step_s:
        cells |= {"first step s": _spread(side.first_step_s), "exit s": _spread(side.exit_s), **(ratios or {})}
    samples = {"first_step_s": side.first_step_s, "exit_s": side.exit_s}
    return Row(name=side.name, command=side.command, cells=cells, samples=samples, failure=side.failure)


def _spread(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.2f} ({min(times):.2f} - {max(times):.2f})"
