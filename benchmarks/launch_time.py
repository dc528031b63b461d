"""T14: the time from the start of the command to the end of the first training step, for `shoal
run` and torchrun in alternation.

`shoal run` is measured twice: with workers forked from a warm process, and with workers that are
fresh interpreters.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
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

TARGETS: Final = {2: 0.4, 8: 0.25}
"""Number of ranks -> maximum time of warm workers, as a multiple of torchrun's time."""
_WIDTH: Final = 400
_BATCH: Final = 32
_TIMEOUT_S: Final = 120


@dataclass(kw_only=True)
class Side:
    """One launcher and its measurements, in seconds."""

    name: str
    command: str
    start: Callable[[Stage, Workload], WithLauncher]
    warm: bool = False
    """True if workers are forked from a warm process."""
    first_step_s: list[float] = field(default_factory=list)
    """Time from the start of the command until all ranks have taken a step."""
    exit_s: list[float] = field(default_factory=list)
    """Time from the start of the command until it has exited. Its workers leave after the first
    step."""
    failure: str = ""


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about 10 minutes."""
    rounds = 2 if options.quick else 6
    rows: list[Row] = []
    verdicts: list[str] = []
    for ranks, target in TARGETS.items():
        theirs, *ours = sides = _sides(ranks)
        for number in range(-1, rounds):
            if any(side.failure for side in sides):
                break
            for side in sides if number % 2 else reversed(sides):
                _launch(side, ranks, counted=number >= 0)
        rows.append(_row(theirs))
        for side in ours:
            if not side.first_step_s or len(side.first_step_s) != len(theirs.first_step_s):
                rows.append(_row(side))
                verdicts.append(f"{side.name} not measured")
                continue
            first, whole = (
                ratio_of_medians(a, b)
                for a, b in ((side.first_step_s, theirs.first_step_s), (side.exit_s, theirs.exit_s))
            )
            rows.append(_row(side, {"ratio": str(first), "ratio to the exit": str(whole)}))
            reached = (
                "" if not side.warm else " (reached)" if first.value <= target else " (not reached)"
            )
            verdicts.append(f"{side.name} {first.value:.3f} x{reached}")
    plots.samples(
        options.output / "t14.png", rows, sample="first_step_s", label="command to first step, s"
    )
    return Table(
        key="t14",
        title="From the command to the first step",
        target="; ".join(
            f"{ranks} ranks <= {target} x torchrun" for ranks, target in TARGETS.items()
        ),
        method=(
            "All launchers start workers on this machine with the same model and data, which exit "
            f"after one step; {rounds} rounds in alternating order after an uncounted one. The "
            "time is measured from the start of the command until the last rank has taken its "
            "first step; `shoal run` also starts Valkey and the coordinator. Its workers are "
            "forked from a process that has imported torch, or are fresh interpreters "
            "(`--no-warm`). Ratios are ratios of medians, with their 95% confidence intervals "
            "(bootstrap over rounds)."
        ),
        columns=("rounds", "first step s", "exit s", "ratio", "ratio to the exit"),
        rows=tuple(rows),
        verdict=f"Measured: {'; '.join(verdicts)}.",
    )


def _sides(ranks: int) -> list[Side]:
    """Returns the launchers, torchrun first."""
    count = f"--standalone --nproc-per-node {ranks}"
    return [
        Side(
            name=f"torchrun, {ranks} ranks",
            command=f"torchrun {count} -m benchmarks.workers.train_ddp",
            start=start_torchrun,
        ),
        Side(
            name=f"shoal, {ranks} ranks",
            command=f"shoal run {count} -m benchmarks.workers.train_shoal",
            start=start_shoal,
            warm=True,
        ),
        Side(
            name=f"shoal, fresh, {ranks} ranks",
            command=f"shoal run {count} --no-warm -m benchmarks.workers.train_shoal",
            start=partial(start_shoal, warm=False),
        ),
    ]


def _launch(side: Side, ranks: int, *, counted: bool) -> None:
    with Stage() as stage:
        directory = stage.directory / "steps"
        directory.mkdir()
        workload = Workload(log=directory, ranks=ranks, width=_WIDTH, batch=_BATCH, steps=1)
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
        if len(steps) != ranks:
            side.failure = f"{len(steps)} of {ranks} ranks did a step\n{stage.outputs()}"
        elif counted:
            side.first_step_s.append((max(steps) - started) / 1e9)
            side.exit_s.append((ended - started) / 1e9)


def _row(side: Side, ratios: dict[str, str] | None = None) -> Row:
    cells = {"rounds": str(len(side.first_step_s))}
    if side.first_step_s:
        cells |= {
            "first step s": _spread(side.first_step_s),
            "exit s": _spread(side.exit_s),
            **(ratios or {}),
        }
    samples = {"first_step_s": side.first_step_s, "exit_s": side.exit_s}
    return Row(
        name=side.name, command=side.command, cells=cells, samples=samples, failure=side.failure
    )


def _spread(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.2f} ({min(times):.2f} - {max(times):.2f})"
