"""T2: the step time of elastic training compared with bare torch DDP on the same model, and with
torchft.

A step is one iteration of the user's loop with each system's own loader: batch, forward, backward,
optimizer, zero_grad. On two ranks, Shoal is measured with three settings for the comparison of the
ranks' replicas: at the default interval, never, and in every step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from benchmarks import plots, turns
from benchmarks.devices import CUDA, Devices
from benchmarks.figures import paired_ratio
from benchmarks.processes import Stage
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.sharded_step import ON_DEVICES
from benchmarks.systems import Torchft, TorchftSettings, start_shoal, start_torchrun
from benchmarks.turns import Course, Side, take_turns
from benchmarks.workers.workload import Workload

TARGET: Final = 1.02
WIDTH: Final = 400
BATCH_OF_RANKS: Final = {2: 64, 3: 32}
"""Samples per rank by number of ranks, for steps of about 5 ms on two cores."""
CUDA_WIDTH: Final = 2048
CUDA_BATCH_OF_RANKS: Final = {2: 1024, 8: 1024}
"""Samples per rank, chosen so that a step should take a few milliseconds on a GPU; this has not
been measured."""
STEPS_PER_BLOCK: Final = 100


def _start_torchft(stage: Stage, workload: Workload) -> Torchft:
    return Torchft(stage, workload, settings=TorchftSettings(), min_replicas=workload.ranks)


def _checking(how_often: str, every: int) -> Side:
    flag = f"--consistency-check-every={every}"
    return Side(
        name=f"shoal checking {how_often}",
        command=f"shoal run --standalone -m benchmarks.workers.train_shoal {flag}",
        start=partial(start_shoal, more=(flag,)),
    )


BASELINE: Final = Side(
    name="torch DDP",
    command="torchrun --standalone -m benchmarks.workers.train_ddp",
    start=start_torchrun,
)
SHOAL: Final = Side(
    name="shoal",
    command="shoal run --standalone -m benchmarks.workers.train_shoal",
    start=start_shoal,
)
NEVER, ALWAYS = CHECKING = _checking("never", 0), _checking("each step", 1)
"""Shoal with comparisons of the ranks' replicas disabled, and with comparisons in every step."""
SIDES: Final = (
    BASELINE,
    SHOAL,
    Side(
        name="torchft",
        command="torchft_lighthouse; per replica python -m benchmarks.workers.train_torchft",
        start=_start_torchft,
    ),
)
SIDES_OF_RANKS: Final = {2: (*SIDES, *CHECKING), 3: SIDES}


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about 4 minutes."""
    devices = options.devices
    rounds = devices.rounds(8 if options.quick else 16)
    batches = CUDA_BATCH_OF_RANKS if devices.kind == CUDA else BATCH_OF_RANKS
    rows = [row for ranks, batch in batches.items() for row in _rows(ranks, batch, rounds, devices)]
    workloads = ", ".join(
        f"{batch} samples per rank on {ranks} ranks" for ranks, batch in batches.items()
    )
    width = devices.size(WIDTH, CUDA_WIDTH)
    plots.samples(
        options.output / "t2.png",
        rows,
        sample="ratio",
        label="mean step time of a block over torch DDP's",
        target=TARGET,
    )
    return Table(
        key="t2",
        title="Step time with elasticity, metrics and the coordinator on, against bare torch DDP",
        target=f"<= {TARGET} x at 5 ms steps",
        method=(
            f"All systems train a {width}-wide perceptron with their own data loaders "
            f"({workloads}). They alternate in blocks of {STEPS_PER_BLOCK} steps, for {rounds} "
            "rounds. The time of a block is the mean step of its ranks. It is divided by the time "
            "of torch DDP's block in the same round; the table shows the median of these ratios, "
            "with its 95% confidence interval (bootstrap over rounds). The other ratio compares "
            "the median steps of the blocks, which single outliers do not affect. CPU ms is the "
            "processor time per step per rank, including launcher and services; other processes "
            "on the machine affect it least. Systems that wait for their turn continue their "
            "background work (heartbeats). "
            f"{devices.describe('Three ranks share two cores.', ON_DEVICES)} Checking: the ranks "
            "compare their replicated values every 100 steps by default (consistency_check_every; "
            "0 turns this off)."
        ),
        columns=turns.COLUMNS,
        rows=devices.named(rows),
        verdict=_verdict(rows),
    )


def sides_of(ranks: int, devices: Devices) -> tuple[Side, ...]:
    """Returns the systems to measure with this number of ranks. torchft has its own environment,
    whose torch is a CPU build."""
    return (BASELINE, SHOAL, *CHECKING) if devices.for_cuda else SIDES_OF_RANKS[ranks]


def _rows(ranks: int, batch: int, rounds: int, devices: Devices) -> list[Row]:
    sides = sides_of(ranks, devices)
    if (failure := devices.lacking(f"T2 with {ranks} ranks", ranks)) is not None:
        return [
            Row(name=f"{side.name}, {ranks} ranks", command=side.command, cells={}, failure=failure)
            for side in sides
        ]
    course = Course(
        ranks=ranks,
        width=devices.size(WIDTH, CUDA_WIDTH),
        batch=batch,
        rounds=rounds,
        steps_per_block=STEPS_PER_BLOCK,
        warm_up_blocks=3,
        device=devices.flag,
    )
    outcomes = take_turns(sides, course)
    return [
        turns.row(
            outcomes[side.name],
            over=None if side is BASELINE else outcomes[BASELINE.name],
            name=f"{side.name}, {ranks} ranks",
            command=side.command.replace("--standalone", f"--standalone --nproc-per-node {ranks}"),
        )
        for side in sides
    ]


def _verdict(rows: Sequence[Row]) -> str:
    measured = {row.name: row for row in rows}
    names = [name for name in measured if name.startswith(f"{SHOAL.name}, ")]
    ratios = {
        name: statistics.median(measured[name].samples["ratio"])
        for name in names
        if "ratio" in measured[name].samples
    }
    if not ratios:
        return "Not measured."
    ratios_text = ", ".join(
        f"{name} {r:.3f} x ({'reached' if r <= TARGET else 'not reached'})"
        for name, r in ratios.items()
    )
    return " ".join([f"Measured: {ratios_text}.", *_cost_of_checks(measured)])


def _cost_of_checks(measured: Mapping[str, Row]) -> list[str]:
    """Returns sentences with the cost of comparing replicas: the ratio of a step with comparisons
    to a step without them, computed round by round."""
    (ranks,) = [ranks for ranks, sides in SIDES_OF_RANKS.items() if NEVER in sides]
    default, never, always = (
        measured[f"{side.name}, {ranks} ranks"].samples.get("step_s", [])
        for side in (SHOAL, NEVER, ALWAYS)
    )
    if not never or not len(default) == len(never) == len(always):
        return []
    return [
        "Step time with comparisons of replicas, divided by the time without: "
        f"{paired_ratio(default, never)} x at the default, {paired_ratio(always, never)} x in "
        "every step."
    ]
