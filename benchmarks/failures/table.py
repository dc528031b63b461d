"""T17: the time that each system needs for the same number of steps under the same schedule of
faults."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from benchmarks import plots
from benchmarks.errors import MeasurementError
from benchmarks.failures import systems
from benchmarks.failures.runs import LONGEST_S, Extent, Run, run
from benchmarks.failures.schedule import Schedule
from benchmarks.kill_recovery import torchft_command
from benchmarks.registry import Options
from benchmarks.report import Row, Table

RANKS: Final = 3
OF_ALLOWED: Final = 1.05
_BATCH: Final = 8
_MICRO_BATCH: Final = 4
_MODELS: Final = ("gpt", "cnn")
_PROBE_STEPS: Final = 60
_PROBE_LONGEST_S: Final = 900.0
_FEWEST_STEPS: Final = 100
SCHEDULE: Final = Schedule(mean_gap_s=20, shortest_gap_s=12, longest_absence_s=4)
QUICK_SCHEDULE: Final = Schedule(mean_gap_s=10, shortest_gap_s=7, longest_absence_s=3)
LAUNCH_S: Final = 12.0
"""Time in seconds until torchrun's first step above which all times of the schedule grow in
proportion."""
NO_FAULTS_S: Final = 40.0
"""Approximate time that torch DDP should take without faults; determines the number of steps."""
QUICK_NO_FAULTS_S: Final = 12.0
_POINTS: Final = 400
"""Maximum number of progress points per row in the report."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One system with its best settings."""

    name: str
    command: str
    start: systems.Start
    own_baseline: bool = True
    """True if the system is compared with its own run without faults, False if it is compared with
    torch DDP."""
    target: bool = False
    """True if the system should reach the target."""
    deterministic: bool = False
    """True if the final parameters should be identical to those of the run without faults."""


@dataclass(kw_only=True)
class Measured:
    """Results of one system on one model."""

    name: str
    command: str
    candidate: Candidate
    without: Run | None = None
    """The run without faults."""
    faulty: Run | None = None
    failure: str = ""
    of_ddp: float | None = None
    """Duration of the run with faults, divided by that of torch DDP without faults."""

    @property
    def of_allowed(self) -> float | None:
        """Duration of the run with faults, divided by the duration that the target allows: 1.05
        times the duration without faults, plus the missing capacity (`Run.missing_s`). None if not
        measured."""
        if self.without is None or self.faulty is None:
            return None
        allowed_s = OF_ALLOWED * self.without.time_s + self.faulty.missing_s
        return self.faulty.time_s / allowed_s

    @property
    def same_bits(self) -> bool:
        """True if the final parameters are identical to those of the run without faults."""
        return bool(
            self.without is not None
            and self.faulty is not None
            and self.faulty.digest
            and self.faulty.digest == self.without.digest
        )


def _shoal(strategy: str, *, deterministic: bool) -> Candidate:
    more = (
        f"--strategy={strategy}",
        *((f"--micro-batch={_MICRO_BATCH}",) if deterministic else ()),
    )
    return Candidate(
        name=f"shoal, {strategy}{', deterministic' if deterministic else ''}",
        command=" ".join(("shoal", *systems.shoal_words(RANKS, more))),
        start=partial(systems.start_shoal, more=more),
        target=True,
        deterministic=deterministic,
    )


def candidates(checkpoint_every: int) -> list[Candidate]:
    """Returns all systems. `checkpoint_every`: number of steps between torchrun's checkpoints."""
    return [
        Candidate(
            name="torchrun, checkpoints",
            command=" ".join(("torchrun", *systems.torchrun_words(RANKS, checkpoint_every))),
            start=partial(systems.start_torchrun, checkpoint_every=checkpoint_every),
            own_baseline=False,
        ),
        Candidate(
            name="torchft, tuned",
            command=torchft_command(systems.TUNED).replace(
                "benchmarks.workers.train_torchft", "benchmarks.workers.failures.train_torchft"
            ),
            start=systems.start_torchft,
        ),
        Candidate(
            name="torch, reconfigured groups",
            command="per rank python -m benchmarks.workers.failures.train_reconfigure",
            start=systems.start_reconfigure,
        ),
        _shoal("ddp", deterministic=False),
        *(_shoal(strategy, deterministic=True) for strategy in ("ddp", "zero2", "fsdp")),
    ]


def interval(*, saving_s: float, step_s: float, mean_gap_s: float) -> int:
    """Returns the number of steps between checkpoints for which the least time is lost. The optimal
    interval is the square root of twice the cost of a checkpoint times the mean time between
    failures (Young, CACM 17(9), 1974; Daly, FGCS 22, 2006)."""
    return max(1, round(math.sqrt(2 * saving_s * mean_gap_s) / step_s))


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about half an hour; with `quick`, about 15
    minutes."""
    schedule = QUICK_SCHEDULE if options.quick else SCHEDULE
    lasting_s = QUICK_NO_FAULTS_S if options.quick else NO_FAULTS_S
    measured = [each for model in _MODELS for each in _of_model(model, schedule, seconds=lasting_s)]
    plots.progress(
        options.output / "t17.png",
        {
            model: [_curve(each) for each in measured if each.name.startswith(f"{model}: ")]
            for model in _MODELS
        },
    )
    return Table(
        key="t17",
        title="Time to the same steps while workers are killed and return",
        target=(
            f"Shoal <= {OF_ALLOWED} x the time without faults + the capacity that was missing; no "
            "sample lost or trained twice; the same bits in deterministic mode"
        ),
        method=_method(schedule, seconds=lasting_s),
        columns=_COLUMNS,
        rows=tuple(row(each) for each in measured),
        verdict=verdict(measured),
    )


_COLUMNS: Final = (
    "kills",
    "time s",
    "no faults s",
    "ratio",
    "missing s",
    "of allowed",
    "of DDP without faults",
    "never trained",
    "trained twice",
    "steps redone",
    "same bits",
    "reduced s",
)


def _of_model(model: str, schedule: Schedule, *, seconds: float) -> list[Measured]:
    plain = Candidate(
        name="torch DDP, no faults",
        command=" ".join(("torchrun", *systems.torchrun_words(RANKS, 0))),
        start=partial(systems.start_torchrun, checkpoint_every=0),
    )
    extent = Extent(model=model, ranks=RANKS, batch=_BATCH, steps=_PROBE_STEPS)
    probe = run(plain.name, plain.start, extent, longest_s=_PROBE_LONGEST_S)
    slower = max(1.0, probe.launch_s / LAUNCH_S)
    schedule = schedule.slowed(slower)
    longest_s = slower * LONGEST_S
    extent = replace(extent, steps=max(_FEWEST_STEPS, round(slower * seconds / probe.step_s)))
    baseline = _measured(plain, extent, schedule=None, without=None, longest_s=longest_s)
    ddp = baseline.without
    every = (
        interval(saving_s=max(ddp.saved_s), step_s=ddp.step_s, mean_gap_s=schedule.mean_gap_s)
        if ddp is not None
        else 100
    )
    rest = [
        _measured(
            candidate,
            extent,
            schedule=schedule,
            without=None if candidate.own_baseline else ddp,
            longest_s=longest_s,
        )
        for candidate in candidates(every)
    ]
    for each in rest:
        if each.faulty is not None and ddp is not None:
            each.of_ddp = each.faulty.time_s / ddp.time_s
    return [baseline, *rest]


def _measured(
    candidate: Candidate,
    extent: Extent,
    *,
    schedule: Schedule | None,
    without: Run | None,
    longest_s: float,
) -> Measured:
    measured = Measured(
        name=f"{extent.model}: {candidate.name}",
        command=f"{candidate.command} --model={extent.model} --ranks={extent.ranks} "
        f"--batch={extent.batch} --steps={extent.steps}",
        candidate=candidate,
        without=without,
    )
    try:
        run_it = partial(run, measured.name, candidate.start, extent, longest_s=longest_s)
        if without is None:
            measured.without = run_it()
            _say(f"{measured.name}: {measured.without.time_s:.1f} s without faults")
        if schedule is not None:
            measured.faulty = run_it(schedule.faults())
            kills = len(measured.faulty.absences)
            _say(f"{measured.name}: {measured.faulty.time_s:.1f} s with {kills} kills")
    except MeasurementError as error:
        measured.failure = str(error)
        _say(f"{measured.name} failed: {error}")
    return measured


def _say(line: str) -> None:
    """Prints a line about the progress of the benchmark, which takes half an hour."""
    print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------- the table


def row(measured: Measured) -> Row:
    """Returns a row of the table."""
    cells: dict[str, str] = {}
    samples: dict[str, Sequence[float]] = {}
    without, faulty = measured.without, measured.faulty
    shown = faulty or (without if not measured.failure else None)
    if without is not None:
        cells["no faults s"] = f"{without.time_s:.1f}"
        samples["no_faults_s"] = [without.time_s]
    if faulty is not None:
        cells |= {
            "kills": str(len(faulty.absences)),
            "time s": f"{faulty.time_s:.1f}",
            "missing s": f"{faulty.missing_s:.1f}",
            "never trained": str(faulty.account.never),
            "trained twice": str(faulty.account.twice),
            "steps redone": str(faulty.account.redone),
            "same bits": "yes" if measured.same_bits else "no",
            "reduced s": f"{faulty.reduced_s:.1f}",
        }
        samples |= {
            "time_s": [faulty.time_s],
            "killed_s": [kill for kill, _ in faulty.absences],
            "returned_s": [back for _, back in faulty.absences],
        }
        if without is not None:
            cells["ratio"] = f"{faulty.time_s / without.time_s:.2f}"
    if (share := measured.of_allowed) is not None:
        cells["of allowed"] = f"{share:.2f}"
    if measured.of_ddp is not None:
        cells["of DDP without faults"] = f"{measured.of_ddp:.2f}"
    if shown is not None:
        points = _thinned(shown.progress)
        samples |= {
            "progress_s": [time_s for time_s, _ in points],
            "progress_step": [step for _, step in points],
        }
    return Row(
        name=measured.name,
        command=measured.command,
        cells=cells,
        samples=samples,
        failure=measured.failure,
    )


def _thinned(progress: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Returns about `_POINTS` of the points, evenly spaced. Also includes the points before and
    after each return to an earlier step."""
    stride = max(1, len(progress) // _POINTS)
    return [
        point
        for number, point in enumerate(progress)
        if number % stride == 0
        or number == len(progress) - 1
        or point[1] <= progress[number - 1][1]
        or progress[number + 1][1] <= point[1]
    ]


def _curve(measured: Measured) -> Row:
    shown = row(measured)
    return Row(name=shown.name.partition(": ")[2], command="", cells={}, samples=shown.samples)


def verdict(all_of_them: Sequence[Measured]) -> str:
    """Returns a sentence with the result of each system that has a target."""
    judged = [
        f"{each.name.replace(': shoal', ':', 1).replace(':,', ':')} {_judged(each)}"
        for each in all_of_them
        if each.candidate.target
    ]
    return f"Measured: Shoal's time divided by the allowed time: {'; '.join(judged)}."


def _judged(measured: Measured) -> str:
    share, faulty = measured.of_allowed, measured.faulty
    if share is None or faulty is None:
        return "not measured"
    account = faulty.account
    wrong = [
        *([f"{account.never} samples lost"] if account.never else []),
        *([f"{account.twice} trained twice"] if account.twice else []),
        *(["other bits"] if measured.candidate.deterministic and not measured.same_bits else []),
    ]
    reached = share <= 1 and not wrong
    return (
        f"{share:.2f} x{''.join(f', {each}' for each in wrong)} "
        f"({'reached' if reached else 'not reached'})"
    )


def _method(schedule: Schedule, *, seconds: float) -> str:
    return (
        f"{RANKS} workers train a decoder (gpt) and a convolutional network (cnn) with AdamW, with "
        f"{_BATCH} samples per rank per step. They run for the number of steps that torch DDP "
        f"takes in about {seconds:g} s. The dataset has exactly as many samples as these steps "
        "need, so a run is one epoch. Every system meets the same seeded schedule of faults. Each "
        "fault kills one worker with SIGKILL. The gaps between kills are exponential, "
        f"{schedule.mean_gap_s:g} s on average and at least {schedule.shortest_gap_s:g} s. After a "
        f"kill, the worker's place stays empty for up to {schedule.longest_absence_s:g} s; a "
        "replacement starts immediately, imports torch, and waits until that time has passed. All "
        f"times of the schedule are longer if torchrun needs more than {LAUNCH_S:g} s until its "
        "first step. Times count from the first step of all workers until the last step is "
        "committed; a system that needs longer meets more faults. *No faults*: the time of the "
        "same system without faults; for torchrun, the time of torch DDP without checkpoints. "
        "*Missing*: the sum of the absences divided by the number of workers. *Of allowed*: the "
        f"time, divided by {OF_ALLOWED} times the time without faults plus the missing capacity. "
        "*Never trained*, *trained twice*: samples, counted by what entered the final parameters. "
        "*Steps redone*: steps that started and were then aborted or undone. *Same bits*: whether "
        "the final parameters are bit-identical to those of the run without faults. *Reduced*: "
        "the time from each kill until all workers have committed a step together again. torchrun "
        "saves checkpoints at the interval that Young's formula gives for their measured cost; "
        "torchft has the settings that are best in T1. docs/benchmarks/failures.md explains the "
        "details."
    )
