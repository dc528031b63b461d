"""T6: a step of zero1, zero2 and fsdp (which is the same as zero3), compared with the sharding of
torch and DeepSpeed, on CPUs over Gloo. Also measures the communication of such a step alone.

Systems whose ratio is measured run in alternation. To measure the communication alone, the
collectives of one fully sharded step are called without any computation, on torch's Gloo backend
and on Shoal's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from benchmarks import plots, turns
from benchmarks.devices import HOST, Devices
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.systems import start_deepspeed, start_module, start_strategy
from benchmarks.turns import Course, Side, take_turns
from benchmarks.workers import blocks

WIDTH: Final = 256
BATCH: Final = 4
COMMUNICATION_TARGET: Final = 0.5
STEP_TARGET: Final = 1.0
_TARGETS: Final = (
    f"(target: at most {COMMUNICATION_TARGET:g} for communication, {STEP_TARGET:g} for a step)"
)
STEPS_PER_BLOCK: Final = 10
ROUNDS: Final = 12
QUICK_ROUNDS: Final = 4
_LARGE_WIDTH: Final = 768
"""Width for blocks as large as those of larger models, in the rows of communication alone."""
_COLLECTIVES: Final = "communication alone"
_ON_THE_HOST: Final = (
    "DeepSpeed runs on its CPU accelerator over Gloo, with torch's AdamW and DeepSpeed's default "
    "settings. The rows of communication alone issue the collectives of a fully sharded step as "
    "FSDP2 does, without computing: two all-gathers and one reduce-scatter per block, for this "
    f"decoder and for one of width {_LARGE_WIDTH}. Two ranks have one core each; four ranks share "
    "two cores."
)


def strategy(name: str) -> Side:
    """Returns the `Side` (one system of a comparison) for a strategy of Shoal."""
    command = f"shoal run --standalone -m benchmarks.workers.train_strategy --strategy {name}"
    return Side(name=f"shoal {name}", command=command, start=partial(start_strategy, strategy=name))


def torch_peer(name: str, key: str) -> Side:
    """Returns the `Side` for torch's equivalent of a strategy. `name`: name of the row. `key`:
    value of `--with` in `benchmarks.workers.train_torch`."""
    module = "benchmarks.workers.train_torch"
    start = partial(start_module, module=module, more=("--with", key))
    return Side(name=name, command=f"torchrun --standalone -m {module} --with {key}", start=start)


def _deepspeed(stage: int) -> Side:
    command = f"torchrun --standalone -m benchmarks.workers.train_deepspeed --stage {stage}"
    return Side(
        name=f"DeepSpeed, stage {stage}",
        command=command,
        start=partial(start_deepspeed, zero_stage=stage),
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of Shoal with equivalent systems. The ratio in each row is the duration of Shoal's
    step divided by that of the other system's step."""

    ours: Side
    theirs: tuple[Side, ...]
    ranks: tuple[int, ...] = (2,)
    width: int = WIDTH


def _communication(width: int, *, ranks: tuple[int, ...]) -> Comparison:
    block_mb = round(4 * 12 * width**2 / 1e6)
    return Comparison(
        ours=_collectives("shoal_gloo", "shoal_gloo", block_mb),
        theirs=(_collectives("torch's Gloo", "gloo", block_mb),),
        ranks=ranks,
        width=width,
    )


def _collectives(name: str, backend: str, block_mb: int) -> Side:
    module = "benchmarks.workers.collectives"
    start = partial(start_module, module=module, more=("--backend", backend))
    return Side(
        name=f"{_COLLECTIVES}, blocks of {block_mb} MB: {name}",
        command=f"torchrun --standalone -m {module} --backend {backend}",
        start=start,
    )


COMPARISONS: Final = (
    Comparison(
        ours=strategy("zero1"),
        theirs=(torch_peer("ZeroRedundancyOptimizer and DDP", "zero-redundancy"), _deepspeed(1)),
    ),
    Comparison(ours=strategy("zero2"), theirs=(_deepspeed(2),)),
    Comparison(ours=strategy("fsdp"), theirs=(torch_peer("FSDP2", "fsdp2"), _deepspeed(3))),
    _communication(WIDTH, ranks=(2, 4)),
    _communication(_LARGE_WIDTH, ranks=(2,)),
)


CUDA_COMPARISONS: Final = (
    Comparison(
        ours=strategy("zero1"),
        theirs=(torch_peer("ZeroRedundancyOptimizer and DDP", "zero-redundancy"),),
        ranks=(2, 8),
    ),
    Comparison(ours=strategy("zero2"), theirs=(), ranks=(2, 8)),
    Comparison(ours=strategy("fsdp"), theirs=(torch_peer("FSDP2", "fsdp2"),), ranks=(2, 8)),
)
"""Comparisons without DeepSpeed, whose environment has a CPU build of torch."""
CUDA_WIDTH: Final = 2048
CUDA_BATCH: Final = 256
ON_DEVICES: Final = (
    "Each rank has a GPU and communicates over NCCL; the time of a block begins and ends when the "
    "device has completed all its work."
)


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about 4 minutes."""
    devices = options.devices
    rounds = devices.rounds(QUICK_ROUNDS if options.quick else ROUNDS)
    comparisons = CUDA_COMPARISONS if devices.for_cuda else COMPARISONS
    rows = [
        row
        for comparison in comparisons
        for ranks in comparison.ranks
        for row in compare(comparison, ranks, rounds, devices)
    ]
    width, batch = devices.size(WIDTH, CUDA_WIDTH), devices.size(BATCH, CUDA_BATCH)
    parameters = sum(p.numel() for p in _decoder(width).parameters())
    plots.samples(
        options.output / "t6.png",
        rows,
        sample="ratio",
        label="Shoal's mean step of a block over the peer's",
        target=STEP_TARGET,
    )
    return Table(
        key="t6",
        title="Sharded steps against torch's FSDP2 and ZeroRedundancyOptimizer, and DeepSpeed",
        target="communication at least 2 x as fast, the step never slower",
        method=(
            f"The model is a decoder of four blocks, {width} wide ({parameters / 1e6:.1f} million "
            f"parameters, {4 * parameters / 1e6:.1f} MB in float32), trained with AdamW on "
            f"{batch} samples of 16 tokens per rank per step"
            f"{devices.describe(', with Gloo over loopback', '')}. The systems of a "
            f"comparison alternate in blocks of {STEPS_PER_BLOCK} steps, for {rounds} rounds. For "
            "each round, Shoal's mean step is divided by the other system's mean step; the row of "
            "the other system shows the median of these ratios, with its 95% confidence interval "
            "(bootstrap over rounds). Shoal runs with launcher, coordinator and metrics. Its step "
            "also sends gradient shards to another rank and updates the mirror there; the other "
            "systems lose state if a rank dies. " + devices.describe(_ON_THE_HOST, ON_DEVICES)
        ),
        columns=turns.COLUMNS,
        rows=devices.named(rows),
        verdict=_verdict(rows),
    )


def compare(comparison: Comparison, ranks: int, rounds: int, devices: Devices = HOST) -> list[Row]:
    """Measures a comparison. Returns Shoal's row, and the rows of the other systems, each with
    Shoal's ratio to it."""
    sides = (comparison.ours, *comparison.theirs)
    if (failure := devices.lacking(f"a comparison of {ranks} ranks", ranks)) is not None:
        return [
            Row(name=f"{side.name}, {ranks} ranks", command=side.command, cells={}, failure=failure)
            for side in sides
        ]
    course = Course(
        ranks=ranks,
        width=devices.size(comparison.width, CUDA_WIDTH),
        batch=devices.size(BATCH, CUDA_BATCH),
        rounds=rounds,
        steps_per_block=STEPS_PER_BLOCK,
        warm_up_blocks=1,
        device=devices.flag,
    )
    outcomes = take_turns(sides, course)
    return [
        turns.row(
            outcomes[side.name],
            name=f"{side.name}, {ranks} ranks",
            command=side.command.replace("--standalone", f"--standalone --nproc-per-node {ranks}"),
            under=None if side is comparison.ours else outcomes[comparison.ours.name],
        )
        for side in sides
    ]


def _decoder(width: int) -> torch.nn.Module:
    with torch.device("meta"):
        return blocks.Decoder(width)


def _verdict(rows: Sequence[Row]) -> str:
    parts = []
    for row in rows:
        if "ratio" not in row.samples:
            continue
        ratio = statistics.median(row.samples["ratio"])
        target = COMMUNICATION_TARGET if row.name.startswith(_COLLECTIVES) else STEP_TARGET
        parts.append(
            f"{row.name} {ratio:.2f} x ({'reached' if ratio <= target else 'not reached'})"
        )
    if not parts:
        return "Not measured."
    return f"Measured: Shoal's time divided by the other system's {_TARGETS}: {'; '.join(parts)}."
