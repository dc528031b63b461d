"""T13 and T15: simulated runs with faults are compared, bit for bit, with the same runs without
faults. Also measures the number of simulated runs per minute.

The simulator (tests/simulation) does all of this; this module starts it and reads its report.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks import plots
from benchmarks.errors import MeasurementError
from benchmarks.processes import Stage
from benchmarks.registry import Options
from benchmarks.report import Row, Table

SEEDS: Final = 10_000
QUICK_SEEDS: Final = 25
PER_MINUTE: Final = 300
_SIMULATION: Final = ("-m", "tests.simulation")
_TIMEOUT_S: Final = 6 * 3600
_RUNS: Final = re.compile(
    r"^(\d+) schedules in ([\d.]+) min, (\d+) a minute in each of (\d+) processes$", re.MULTILINE
)
_WRONG: Final = re.compile(r"^wrong: (0|\{.*\})$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Account:
    """Final report of a run of the simulator."""

    schedules: int
    per_minute: float
    """Number of simulated schedules (runs) per minute on one core."""
    wrong: Mapping[str, int]
    """Number of schedules whose result differs from that of the run without faults, by kind of
    difference. A schedule with two kinds of difference counts in both."""

    @property
    def bitwise(self) -> int:
        """Number of schedules with the same result as the run without faults. It is a lower bound,
        because a schedule with several kinds of difference is subtracted several times."""
        return self.schedules - sum(self.wrong.values())


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about an hour on two cores, because it is
    the simulated half of `make chaos`."""
    processes = ("--processes", "1" if options.quick else str(len(os.sched_getaffinity(0))))
    seeds = (*_SIMULATION, "--seeds", str(QUICK_SEEDS if options.quick else SEEDS), *processes)
    tears = (
        *_SIMULATION,
        "--exhaustive",
        *(("--strategies", "ddp", "--loops", "flat") if options.quick else ()),
        *processes,
    )
    rows = [_row("numbered schedules", seeds), _row("every tear of a step", tears)]
    plots.samples(
        options.output / "t13.png",
        rows,
        sample="per_minute",
        label="schedules a minute on one core",
        target=PER_MINUTE,
    )
    return Table(
        key="t13",
        title="Faulty runs against fault-free runs, simulated",
        target=f"{SEEDS} numbered schedules, and every interruption after which only some ranks "
        "have a collective's result (a *tear* of a step), end bitwise equal to the run without "
        f"faults; >= {PER_MINUTE} schedules per minute on one core (T15)",
        method=(
            "The simulator runs the session, strategies and loaders on in-memory ranks in virtual "
            "time; a schedule determines which ranks fail, when, and in which order all events "
            "happen. Each run is compared with the run without faults: parameters, optimizer "
            "state, every result of step(), and every sample. A numbered schedule determines "
            "strategy, loop, 2 to 4 ranks and 1 to 4 faults from its number, and has 10 steps. All "
            "tears with 3 ranks are tested: strategy x loop x collective x dying rank x ranks with "
            "the result. The rate is that of one process, with as many processes as cores, and "
            "includes the runs without faults and the minimization of failing schedules. A "
            "schedule that is wrong in two ways counts twice. tests/simulation/README.md describes "
            "what is simulated."
        ),
        columns=("schedules", "bitwise", "wrong", "a minute and core"),
        rows=tuple(rows),
        verdict=verdict(rows),
    )


def account_of(output: str) -> Account:
    """Parses the last lines of the simulator's output. Raises MeasurementError if they are
    missing."""
    runs, wrong = _RUNS.search(output), _WRONG.search(output)
    if runs is None or wrong is None:
        last = output.strip().rpartition("\n")[2]
        raise MeasurementError(
            f"the simulator gave no account of its runs and ended with: {last}\n{output[-2000:]}"
        )
    return Account(
        schedules=int(runs[1]), per_minute=float(runs[3]), wrong=ast.literal_eval(wrong[1]) or {}
    )


def described(name: str, command: str, account: Account) -> Row:
    """Returns the row for an account."""
    wrong = ", ".join(f"{count} {kind}" for kind, count in account.wrong.items()) or "0"
    cells = {"schedules": str(account.schedules), "bitwise": str(account.bitwise), "wrong": wrong}
    figures = {
        "schedules": account.schedules,
        "bitwise": account.bitwise,
        "per_minute": account.per_minute,
    }
    return Row(
        name=name,
        command=command,
        cells=cells | {"a minute and core": f"{account.per_minute:.0f}"},
        samples={key: [float(value)] for key, value in figures.items()},
    )


def verdict(rows: Sequence[Row]) -> str:
    """Returns sentences for the report that state which targets the measured rows reach and which
    they miss."""
    return f"Measured: {'; '.join(map(_judged, rows))}."


def _judged(row: Row) -> str:
    if row.failure:
        return f"{row.name} not measured"
    schedules, bitwise, per_minute = (
        row.samples[key][0] for key in ("schedules", "bitwise", "per_minute")
    )
    equal, fast = (
        ("reached" if reached else "not reached")
        for reached in (bitwise == schedules, per_minute >= PER_MINUTE)
    )
    return (
        f"{row.name}: {bitwise:.0f} of {schedules:.0f} bitwise ({equal}), {per_minute:.0f} a "
        f"minute ({fast})"
    )


def _row(name: str, words: Sequence[str]) -> Row:
    command = " ".join(("python", *words))
    try:
        return described(name, command, account_of(_run(words)))
    except MeasurementError as error:
        return Row(name=name, command=command, cells={}, failure=str(error))


def _run(words: Sequence[str]) -> str:
    """Runs a command and returns its output. Exit status 1 means that a schedule had a different
    result. That is a measurement, so it is not reported as an error."""
    with Stage() as stage:
        process = stage.start("simulation", [sys.executable, *words])
        stage.await_end(process, timeout_s=_TIMEOUT_S)
        return stage.texts()["simulation"]
