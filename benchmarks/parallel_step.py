"""T7: a step of ddp, tensor, pipeline and hybrid, compared with torch's equivalents, on CPUs over
Gloo, in alternation.

Both sides perform the same computation and send the same data: splits, micro-batches and batches
are equal.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from benchmarks import plots, turns
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.sharded_step import (
    BATCH,
    CUDA_BATCH,
    ON_DEVICES,
    QUICK_ROUNDS,
    ROUNDS,
    STEPS_PER_BLOCK,
    Comparison,
    compare,
    torch_peer,
)
from benchmarks.systems import start_strategy
from benchmarks.turns import Side

TARGET: Final = 1.02
MICRO_BATCHES: Final = 4


def _strategy(name: str, options: Mapping[str, Any], *, replicas: int) -> Side:
    more = ("--options", json.dumps(options), "--replicas", str(replicas))
    command = (
        f"shoal run --standalone -m benchmarks.workers.train_strategy --strategy {name} "
        f"--options '{more[1]}' --replicas {replicas}"
    )
    return Side(
        name=f"shoal {name}",
        command=command,
        start=partial(start_strategy, strategy=name, more=more),
    )


COMPARISONS: Final = (
    Comparison(ours=_strategy("ddp", {}, replicas=2), theirs=(torch_peer("torch DDP", "ddp"),)),
    Comparison(
        ours=_strategy("tensor", {}, replicas=1),
        theirs=(torch_peer("parallelize_module", "tensor"),),
    ),
    Comparison(
        ours=_strategy(
            "pipeline", {"schedule": "1f1b", "micro_batches": MICRO_BATCHES}, replicas=1
        ),
        theirs=(torch_peer("torch.distributed.pipelining, 1F1B", "pipelining"),),
    ),
    Comparison(
        ours=_strategy("hybrid", {"tensor_parallel_size": 2}, replicas=2),
        theirs=(torch_peer("parallelize_module and FSDP2", "tensor-and-fsdp2"),),
        ranks=(4,),
    ),
)


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about 3 minutes."""
    devices = options.devices
    rounds = devices.rounds(QUICK_ROUNDS if options.quick else ROUNDS)
    rows = [
        row
        for comparison in COMPARISONS
        for ranks in comparison.ranks
        for row in compare(comparison, ranks, rounds, devices)
    ]
    plots.samples(
        options.output / "t7.png",
        rows,
        sample="ratio",
        label="Shoal's mean step of a block over the peer's",
        target=TARGET,
    )
    return Table(
        key="t7",
        title="Steps of ddp, tensor, pipeline and hybrid against torch's own",
        target=f"<= {TARGET} x",
        method=(
            f"The model is the decoder of T6, with {devices.size(BATCH, CUDA_BATCH)} samples per "
            "replica per step. tensor and pipeline have one replica; hybrid has two replicas of "
            "two ranks. The two "
            f"systems of a comparison alternate in blocks of {STEPS_PER_BLOCK} steps, for {rounds} "
            "rounds. For each round, Shoal's mean step is divided by the other system's mean "
            "step; the row of the other system shows the median of these ratios, with its 95% "
            "confidence interval (bootstrap over rounds). Under tensor, both systems split "
            "attention by heads and perceptrons by their hidden layer; Shoal also splits the "
            "embedding and the output layer. torch's replicas of hybrid keep parameters gathered "
            "(reshard_after_forward=False), which sends as much as an all-reduce. The pipelines "
            f"run 1F1B with {MICRO_BATCHES} micro-batches. Shoal runs with launcher, coordinator "
            "and metrics. "
            + devices.describe(
                "Two ranks have one core each; four ranks share two cores.", ON_DEVICES
            )
        ),
        columns=turns.COLUMNS,
        rows=devices.named(rows),
        verdict=_verdict(rows),
    )


def _verdict(rows: Sequence[Row]) -> str:
    ratios = {
        row.name: statistics.median(row.samples["ratio"]) for row in rows if "ratio" in row.samples
    }
    judged = [
        f"{name} {ratio:.3f} x ({'reached' if ratio <= TARGET else 'not reached'})"
        for name, ratio in ratios.items()
    ]
    return (
        f"Measured: Shoal's step time divided by the other system's: {'; '.join(judged)}."
        if judged
        else "Not measured."
    )
