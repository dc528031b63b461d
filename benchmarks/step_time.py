"""T2: the step time of elastic training against bare torch DDP on the same model, with torchft beside it.

A step is one iteration of the user's loop with each system's own loader: batch, forward, backward, optimizer, zero_grad.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from benchmarks import plots, turns
from benchmarks.processes import Stage
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.systems import Torchft, TorchftSettings, start_shoal, start_torchrun
from benchmarks.turns import Course, Side, take_turns
from benchmarks.workers.workload import Workload

TARGET: Final = 1.02
WIDTH: Final = 400
BATCH_OF_RANKS: Final = {2: 64, 3: 32}
"""For steps of about 5 ms on two cores."""
STEPS_PER_BLOCK: Final = 100


def _start_torchft(stage: Stage, workload: Workload) -> Torchft:
    return Torchft(stage, workload, settings=TorchftSettings(), min_replicas=workload.ranks)


BASELINE: Final = Side(name="torch DDP", command="torchrun --standalone -m benchmarks.workers.train_ddp", start=start_torchrun)
SIDES: Final = (
    BASELINE,
    Side(name="shoal", command="shoal run --standalone -m benchmarks.workers.train_shoal", start=start_shoal),
    Side(
        name="torchft",
        command="torchft_lighthouse; per replica python -m benchmarks.workers.train_torchft",
        start=_start_torchft,
    ),
)


def measure(options: Options) -> Table:
    """See the module. About 3 minutes."""
    rounds = 8 if options.quick else 16
    rows = [row for ranks in BATCH_OF_RANKS for row in _rows(ranks, rounds)]
    workloads = ", ".join(f"{batch} samples per rank on {ranks} ranks" for ranks, batch in BATCH_OF_RANKS.items())
    plots.samples(options.output / "t2.png", rows, sample="ratio", label="mean step time of a block over torch DDP's", target=TARGET)
    return Table(
        key="t2",
        title="Step time with elasticity, metrics and the coordinator on, against bare torch DDP",
        target=f"<= {TARGET} x at 5 ms steps",
        method=(
            f"All systems train a {WIDTH}-wide perceptron with their own data loaders ({workloads}). They take turns in blocks of "
            f"{STEPS_PER_BLOCK} steps, {rounds} rounds. A block's figure is the mean step of its ranks; the ratio is the median of the "
            "ratios to torch DDP's block of the same round, with its 95 % confidence interval (bootstrap over rounds). The other ratio "
            "compares the blocks' median steps, which single hiccups do not move. CPU ms is the processor time of a step and rank, that of "
            "launcher and services included; other users of the machine move it least. Systems that wait for their turn keep their "
            "background work (heartbeats). Three ranks share two cores."
        ),
        columns=turns.COLUMNS,
        rows=tuple(rows),
        verdict=_verdict(rows),
    )


def _rows(ranks: int, rounds: int) -> list[Row]:
    course = Course(ranks=ranks, width=WIDTH, batch=BATCH_OF_RANKS[ranks], rounds=rounds, steps_per_block=STEPS_PER_BLOCK, warm_up_blocks=3)
    outcomes = take_turns(SIDES, course)
    return [
        turns.row(
            outcomes[side.name],
            over=None if side is BASELINE else outcomes[BASELINE.name],
            name=f"{side.name}, {ranks} ranks",
            command=side.command.replace("--standalone", f"--standalone --nproc-per-node {ranks}"),
        )
        for side in SIDES
    ]


def _verdict(rows: Sequence[Row]) -> str:
    ratios = {row.name: statistics.median(row.samples["ratio"]) for row in rows if row.name.startswith("shoal") and "ratio" in row.samples}
    if not ratios:
        return "Not measured."
    return "Measured: " + ", ".join(f"{name} {r:.3f} x ({'reached' if r <= TARGET else 'not reached'})" for name, r in ratios.items()) + "."
