"""T10: the time to reach the same loss if one of four workers is four times slower, for async_sgd,
ddp and local_sgd."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks import plots
from benchmarks.errors import MeasurementError
from benchmarks.figures import Ratio, ratio_of_medians
from benchmarks.processes import Stage
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.systems import start_straggler
from benchmarks.workers.train_straggler import STAYS_STEPS, TRAINED_ON

RANKS: Final = 4
SLOW: Final = 4
OF_DDP: Final = 0.5
OF_IDEAL: Final = 1.3
IDEAL: Final = RANKS / (RANKS - 1 + 1 / SLOW)
"""Time of a step whose work is divided by speed, relative to a step without a slow worker."""
MICRO_BATCH: Final = 4
COMPUTE_MS: Final = 50
BATCH: Final = 16
LOSS: Final = 0.3
LEARNING_RATES: Final = (0.4, 0.8, 0.2, 1.6, 0.1)
"""Learning rates that are tried for all systems, the best guesses first, so that the others can be
stopped early."""
_QUICK_LEARNING_RATES: Final = (0.4,)
_SYNC_EVERY: Final = 4
_BOUND: Final = 3
_LONGEST_S: Final = 60.0
_START_TIMEOUT_S: Final = 60.0
_WORKER: Final = "benchmarks.workers.train_straggler"


@dataclass(kw_only=True)
class System:
    """One strategy, with or without a slow worker, and the results of its runs."""

    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    slow: int
    """Factor by which the last rank computes more slowly than the others; 1: equally fast."""
    look_every: int = 1
    """Number of steps between two evaluations of the loss. For local_sgd, it is the number of steps
    between averages, because the ranks have different parameters in between."""
    micro_batch: int = 0
    """Number of samples in a micro-batch; 0: batches are not divided into micro-batches."""
    tried: dict[float, float] = field(default_factory=dict)
    """Learning rate -> seconds until the loss was reached; only for rates that reached it."""
    learning_rate: float | None = None
    """Learning rate that reached the loss soonest; None: no learning rate has reached it."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """Records of rank 0, one per run at `learning_rate`."""
    failure: str = ""

    @property
    def name(self) -> str:
        options = ", ".join(f"{key} {value}" for key, value in self.options.items())
        if self.micro_batch:
            options = f"micro-batches of {self.micro_batch}, dealt by speed"
        given = f" ({options})" if options else ""
        return f"{self.strategy}{given}{', one slow' if self.slow > 1 else ''}"

    @property
    def servers(self) -> int:
        return 1 if self.strategy == "async_sgd" else 0

    @property
    def times_s(self) -> list[float]:
        """Seconds from the first step until the loss was reached, for each run at `learning_rate`;
        empty unless all runs reached it."""
        times = [run["reached_s"] for run in self.runs]
        return [] if None in times else times

    @property
    def step_s(self) -> float | None:
        """Seconds per step of rank 0 in the run that the plot shows; None if not measured. Unlike
        the time until the loss is reached, it does not depend on the learning rate."""
        if not self.runs or len(self.runs[0]["times_s"]) < 2:
            return None
        times_s = self.runs[0]["times_s"]
        return float(times_s[-1]) / ((len(times_s) - 1) * self.look_every)

    def words(self, learning_rate: float, *, within_s: float) -> list[str]:
        """Returns the flags of the worker program, except for the output file. `within_s`: time
        limit of the run in seconds."""
        return [
            *(
                f"--strategy={self.strategy}",
                f"--options={json.dumps(self.options)}",
                f"--learning-rate={learning_rate:g}",
            ),
            *(
                f"--ranks={RANKS}",
                f"--batch={BATCH}",
                f"--compute-ms={COMPUTE_MS}",
                f"--slow={self.slow}",
                *([f"--micro-batch={self.micro_batch}"] if self.micro_batch else []),
            ),
            *(f"--target={LOSS}", f"--look-every={self.look_every}", f"--within-s={within_s:g}"),
        ]

    @property
    def command(self) -> str:
        """Command of a run with the best learning rate, for display in the table."""
        rate = LEARNING_RATES[0] if self.learning_rate is None else self.learning_rate
        servers = f" --servers {self.servers}" if self.servers else ""
        words = shlex.join([*self.words(rate, within_s=_LONGEST_S), "--output=seen.json"])
        return f"shoal run --standalone --nproc-per-node {RANKS}{servers} -m {_WORKER} {words}"


def systems() -> list[System]:
    """Returns all systems: first those with a slow worker, then those without. In each group, ddp
    comes first."""
    return [
        system
        for slow in (SLOW, 1)
        for system in (
            System(strategy="ddp", slow=slow),
            System(strategy="ddp", micro_batch=MICRO_BATCH, slow=slow),
            System(
                strategy="local_sgd",
                options={"sync_every": _SYNC_EVERY},
                slow=slow,
                look_every=_SYNC_EVERY,
            ),
            System(strategy="async_sgd", options={"consistency": "asp"}, slow=slow),
            System(
                strategy="async_sgd",
                options={"consistency": "ssp", "staleness_bound": _BOUND},
                slow=slow,
            ),
        )
    ]


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about 25 minutes; with `quick`, which uses
    one learning rate for all systems, about 4."""
    all_of_them = systems()
    rates, rounds = (_QUICK_LEARNING_RATES, 1) if options.quick else (LEARNING_RATES, 3)
    for system in all_of_them:
        find_learning_rate(system, rates)
    for number in range(rounds):
        for system in all_of_them if number % 2 else reversed(all_of_them):
            if (
                system.learning_rate is not None
                and not system.failure
                and (run := _run(system, system.learning_rate, within_s=_LONGEST_S))
            ):
                system.runs.append(run)
    ddp = all_of_them[0]
    rows = tuple(
        row(system, ddp, _without_straggler(system, all_of_them)) for system in all_of_them
    )
    panels = {
        title: [
            row for row, system in zip(rows, all_of_them, strict=True) if (system.slow > 1) is slow
        ]
        for title, slow in (
            (f"one of {RANKS} workers {SLOW} x slower", True),
            ("none slower", False),
        )
    }
    plots.curves(
        options.output / "t10.png",
        panels,
        x="time_s",
        y="loss",
        labels=("s", "loss on the validation set"),
        target=LOSS,
    )
    return Table(
        key="t10",
        title=f"One of {RANKS} workers {SLOW} x slower: time to the same loss",
        target=(
            f"async_sgd (asp) <= {OF_DDP} x ddp; a step of ddp with micro-batches dealt by speed "
            f"<= {OF_IDEAL} x the ideal"
        ),
        method=(
            f"{RANKS} workers train a perceptron (64, 128 and 10 wide) on {TRAINED_ON} of "
            f"scikit-learn's handwritten digits, {BATCH} samples per worker per step, with plain "
            f"SGD, until the cross-entropy on the other images is at most {LOSS} and stays there "
            f"for {STAYS_STEPS} steps of rank 0. The time is measured from rank 0's first step to "
            "the first of these steps. Rank 0 evaluates the values of every step, or, under "
            f"local_sgd, the values of every average (every {_SYNC_EVERY} steps). Because the "
            "workers share this machine's cores, the slowness is simulated by sleeping: the "
            "forward and backward pass, including rank 0's evaluation, are extended to "
            f"{COMPUTE_MS} ms, and on the slow worker to {SLOW * COMPUTE_MS} ms. The rest of the "
            "step (all-reduce, or push and pull, and the update) is not extended. Model, data, "
            "samples per step of a worker and per epoch are the same for all. "
            f"{_rates_said(rates)} All rows were measured in {rounds} rounds, in alternating "
            "order. Ratios are ratios of medians, with their 95% confidence intervals (bootstrap "
            f"over rounds). Under ssp, a worker may be {_BOUND} steps ahead of the slowest, which "
            "helps if a worker is slow occasionally, but not if it is always slow. The ideal "
            f"division of work makes a step {IDEAL:.3f} times as long as without a slow worker. "
            "The seconds per step are those of the run that the plot shows."
        ),
        columns=(
            "learning rate",
            "runs",
            "steps of rank 0",
            "s per step",
            "s to loss",
            "of ddp, one slow",
            "of itself, none slow",
        ),
        rows=rows,
        verdict=verdict(all_of_them),
    )


def _rates_said(rates: Sequence[float]) -> str:
    if len(rates) == 1:
        return f"The learning rate is {rates[0]:g} for all, tuned for none."
    tried = ", ".join(f"{rate:g}" for rate in sorted(rates))
    return (
        f"The learning rate of each row is whichever of {tried} reached the loss soonest in "
        "earlier runs, one for each rate, which were stopped after twice the best time so far."
    )


def find_learning_rate(system: System, rates: Sequence[float]) -> None:
    """Tries all learning rates, and sets `system.learning_rate` to the best one. If there is only
    one, it is used without a trial."""
    if len(rates) == 1:
        system.learning_rate = rates[0]
        return
    for rate in rates:
        best_s = min(system.tried.values(), default=_LONGEST_S / 2)
        if (
            not system.failure
            and (run := _run(system, rate, within_s=2 * best_s))
            and run["reached_s"] is not None
        ):
            system.tried[rate] = run["reached_s"]
    system.learning_rate = min(system.tried, key=system.tried.__getitem__, default=None)


def _run(system: System, learning_rate: float, *, within_s: float) -> dict[str, Any] | None:
    """Performs one training run and returns the record of rank 0. If the run fails, returns None
    and sets `system.failure`."""
    try:
        with Stage() as stage:
            output = stage.directory / "seen.json"
            words = (*system.words(learning_rate, within_s=within_s), f"--output={output}")
            start_straggler(stage, ranks=RANKS, servers=system.servers, words=words)
            stage.wait_until(system.name, output.exists, timeout_s=within_s + _START_TIMEOUT_S)
            seen: dict[str, Any] = json.loads(output.read_text())
            return seen
    except MeasurementError as error:
        system.failure = str(error)
        return None


# ---------------------------------------------------------------------------------------- the table


def _without_straggler(system: System, all_of_them: Sequence[System]) -> System:
    """Returns the system that has the same strategy and options as `system`, but no slow worker."""
    return next(
        other
        for other in all_of_them
        if other.slow == 1
        and (other.strategy, other.options, other.micro_batch)
        == (system.strategy, system.options, system.micro_batch)
    )


def row(system: System, ddp: System, even: System) -> Row:
    """Returns a row of the table. The system is compared with `ddp`, which has the slow worker too,
    and with `even`, the same strategy without a slow worker."""
    cells = {"runs": str(len(system.runs))}
    if system.learning_rate is not None:
        cells["learning rate"] = f"{system.learning_rate:g}"
    if system.runs:
        cells["steps of rank 0"] = f"{statistics.median(run['steps'] for run in system.runs):g}"
    if system.step_s is not None:
        cells["s per step"] = f"{system.step_s:.3f}"
    if system.times_s:
        cells["s to loss"] = f"{statistics.median(system.times_s):.2f}"
    for column, other in (("of ddp, one slow", ddp), ("of itself, none slow", even)):
        if (ratio := compared(system, other)) is not None:
            cells[column] = str(ratio)
    samples = {
        "time_to_loss_s": system.times_s,
        "tried_learning_rate": list(system.tried),
        "tried_s": list(system.tried.values()),
    }
    if system.runs:
        samples |= {"time_s": system.runs[0]["times_s"], "loss": system.runs[0]["losses"]}
    failure = system.failure or (
        "" if system.times_s else f"a loss of {LOSS} was not reached within {_LONGEST_S:g} s"
    )
    return Row(
        name=system.name, command=system.command, cells=cells, samples=samples, failure=failure
    )


def compared(system: System, other: System) -> Ratio | None:
    """Returns the time that `system` needs divided by that of `other`. Returns None if they are the
    same system, or if either was not measured."""
    if system is other or not system.times_s or len(system.times_s) != len(other.times_s):
        return None
    return ratio_of_medians(system.times_s, other.times_s)


def verdict(all_of_them: Sequence[System]) -> str:
    """Returns a text that states whether async_sgd reached the target, and how long each strategy
    took with the slow worker."""
    ddp, *others = (system for system in all_of_them if system.slow > 1)
    parts = []
    for system in others:
        ratio = compared(system, ddp)
        judged = (
            f" ({'reached' if ratio.value <= OF_DDP else 'not reached'})"
            if ratio is not None and "asp" in system.name
            else ""
        )
        parts.append(
            f"{system.name.removesuffix(', one slow')} "
            f"{'not measured' if ratio is None else f'{ratio.value:.2f} x{judged}'}"
        )
    return f"Measured: time divided by ddp's: {'; '.join(parts)}.{_of_ideal(all_of_them)}"


def _of_ideal(all_of_them: Sequence[System]) -> str:
    """Returns a sentence that compares a step of ddp, with micro-batches dealt by speed, to a step
    in which the work is divided ideally."""
    by_speed = next(one for one in all_of_them if one.slow > 1 and one.micro_batch)
    step_s, even_s = by_speed.step_s, _without_straggler(by_speed, all_of_them).step_s
    if step_s is None or even_s is None:
        return " ddp with micro-batches dealt by speed: not measured."
    of_ideal = step_s / even_s / IDEAL
    judged = "reached" if of_ideal <= OF_IDEAL else "not reached"
    return (
        f" A step of ddp with micro-batches dealt by speed takes {of_ideal:.2f} x as long as with "
        f"the ideal division ({judged})."
    )
