"""T8: measures the memory that each strategy uses and the bytes that it sends, and compares them
with the documented formulas.

Each strategy is launched once per number of ranks; nothing is timed. `benchmarks.workers.account`
documents what is counted, and how.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks import plots
from benchmarks.errors import MeasurementError
from benchmarks.processes import Stage
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.systems import start_account
from benchmarks.workers.blocks import BLOCKS, TOKENS, WORDS

WIDTH: Final = 256
TOLERANCE: Final = 0.05
_STEPS: Final = 8
"""Number of counted steps; the same number of uncounted steps comes first."""
_ROUND: Final = 4
"""Steps between two averages of local_sgd."""
_MIB: Final = 2**20
_TIMEOUT_S: Final = 180


@dataclass(frozen=True, kw_only=True)
class Case:
    """One strategy, with the memory that a rank should use and the bytes that it should send for a
    given number of ranks. The unit is P, the size of the parameters. With AdamW, gradients take P
    and optimizer state 2P."""

    strategy: str
    held: Callable[[int], float] | None
    """Returns the size of parameters, gradients and optimizer state together, for a number of
    ranks. None: there is no formula in this unit."""
    sent: Callable[[int], float] | None
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = (2, 3, 4)
    replicas: Callable[[int], int] = lambda ranks: ranks
    """Returns the number of replicas for a number of ranks; each replica trains `batch` samples per
    step."""
    batch: int = 1
    servers: int = 0

    @property
    def name(self) -> str:
        return " ".join([self.strategy, *(f"{key}={value}" for key, value in self.options.items())])


def _all_reduce(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


_BLOCK: Final = 12 * WIDTH * WIDTH + 4 * WIDTH
_END: Final = WORDS * WIDTH + 2 * WIDTH
"""Elements of a block, and of the output layer with its norm."""
_P: Final = BLOCKS * _BLOCK + _END + WORDS * WIDTH
_WIDE_BATCH: Final = 16
"""Samples per replica per step for strategies that send activations, chosen so that activations
outweigh the rest."""
_ACTIVATION: Final = _WIDE_BATCH * TOKENS * WIDTH / _P
_LOGITS: Final = _WIDE_BATCH * TOKENS * WORDS / _P
"""Size of the logits in multiples of P."""


def _tensor_sends(ranks: int) -> float:
    """Returns the size sent per step by tensor parallelism, in multiples of P. The activation is
    all-reduced four times per block, once for the embedding and once for the output layer, which
    also gathers the logits."""
    return _all_reduce(ranks) * _ACTIVATION * (4 * BLOCKS + 2) + _LOGITS * (ranks - 1) / ranks


def _pipeline_sends(ranks: int) -> float:
    """Returns the size sent per step by pipeline parallelism, in multiples of P, averaged over all
    ranks. At each stage boundary, the activation and its gradient are sent."""
    return 2 * (ranks - 1) * _ACTIVATION / ranks


CASES: Final = (
    Case(strategy="ddp", held=lambda n: 4, sent=_all_reduce),
    Case(strategy="zero1", held=lambda n: 2 + 2 / n, sent=_all_reduce),
    Case(strategy="zero2", held=lambda n: 1 + 3 / n, sent=_all_reduce),
    Case(strategy="zero3", held=lambda n: 4 / n, sent=lambda n: 1.5 * _all_reduce(n)),
    Case(strategy="fsdp", held=lambda n: 4 / n, sent=lambda n: 1.5 * _all_reduce(n)),
    Case(
        strategy="hsdp",
        options={"shard_size": 2},
        ranks=(4,),
        held=lambda _: 2,
        sent=lambda _: 1.5 + 0.5,
    ),
    Case(
        strategy="tensor",
        ranks=(2, 4),
        replicas=lambda _: 1,
        batch=_WIDE_BATCH,
        held=lambda n: 4 / n,
        sent=_tensor_sends,
    ),
    Case(
        strategy="pipeline",
        options={"schedule": "1f1b", "micro_batches": 4},
        ranks=(2, 4),
        replicas=lambda _: 1,
        batch=_WIDE_BATCH,
        held=lambda n: 4 * (BLOCKS / n * _BLOCK + _END) / _P,  # the stage with the output layer
        sent=_pipeline_sends,
    ),
    Case(
        strategy="hybrid",
        options={"tensor_parallel_size": 2},
        ranks=(4,),
        replicas=lambda _: 2,
        batch=_WIDE_BATCH,
        held=lambda _: 2,
        # and an all-reduce of half of the gradients between two replicas
        sent=lambda _: _tensor_sends(2) + 0.5,
    ),
    Case(
        strategy="hybrid",
        options={"tensor_parallel_size": 2, "data_parallel_strategy": "zero2"},
        ranks=(4,),
        replicas=lambda _: 2,
        batch=_WIDE_BATCH,
        held=lambda _: 0.5 + 3 / 4,
        sent=lambda _: _tensor_sends(2) + 0.5,
    ),
    Case(
        strategy="hybrid",
        options={"tensor_parallel_size": 2, "data_parallel_strategy": "fsdp"},
        ranks=(4,),
        replicas=lambda _: 2,
        batch=_WIDE_BATCH,
        held=lambda _: 4 / 4,
        # two gatherings and a reduction, of a half, between two replicas
        sent=lambda _: _tensor_sends(2) + 0.75,
    ),
    Case(
        strategy="local_sgd",
        options={"sync_every": _ROUND},
        held=lambda n: 4,
        sent=lambda n: _all_reduce(n) / _ROUND,
    ),
    Case(strategy="async_sgd", servers=1, held=lambda n: 2, sent=lambda n: 2),
)


@dataclass(frozen=True, kw_only=True)
class Account:
    """Bytes measured in one launch. Sizes in memory are the maximum over the ranks, sent bytes the
    mean."""

    model: int
    parameters: int
    gradients: int
    optimizer: int
    mirrors: int
    peak: int
    sent: float
    """Bytes sent per step, without those sent to mirrors. With parameter servers, received bytes
    are added."""
    sent_to_mirrors: float

    @property
    def held(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, float]], *, with_received: bool) -> Account:
        """Combines the measurements of all ranks. `with_received`: True to add received bytes to
        the sent bytes."""

        def most(*roles: str) -> int:
            return int(max(sum(rank[role] for role in roles) for rank in ranks))

        # Sums over the ranks are exact; a rank's own part depends on the order of an uneven ring.
        sent = statistics.fmean(
            r["sent"] - r["sent_to_mirrors"] + (r["received"] if with_received else 0.0)
            for r in ranks
        )
        return cls(
            model=most("model"),
            parameters=most("parameters"),
            gradients=most("gradients"),
            optimizer=most("optimizer"),
            mirrors=most("mirrored_parameters", "mirrored_gradients", "mirrored_optimizer"),
            peak=most("peak"),
            sent=sent,
            sent_to_mirrors=statistics.fmean(r["sent_to_mirrors"] for r in ranks),
        )


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about 4 minutes."""
    rows = [
        _row(case, ranks)
        for case in CASES
        for ranks in (case.ranks[:1] if options.quick else case.ranks)
    ]
    plots.parts(
        options.output / "t8.png",
        rows,
        stacks={
            "held by a rank, MiB": ("parameters", "gradients", "optimizer", "mirrors"),
            "sent by a rank in a step, MiB": ("sent", "sent_to_mirrors"),
        },
        mark="peak",
    )
    return Table(
        key="t8",
        title="Memory and bytes on the wire of each strategy, against the formulas",
        target=f"within {TOLERANCE:.0%} of docs/strategies (replicas in peers' memory are "
        "counted separately)",
        method=(
            "The model is the decoder of T6 (P = 13.0 MiB, float32) with AdamW, so G = P and O = "
            "2P. Ranks communicate over Gloo on loopback. Each step has one sample per rank, or "
            f"{_WIDE_BATCH} per replica under strategies that send activations. All columns except "
            "the ratios are in MiB per rank. Memory is counted over distinct tensor storages, on "
            "the rank with the most: parameters and optimizer state between steps, and gradients "
            "after the backward pass or at the update. Other memory of a strategy (sums of "
            "gradients for tensor, pipeline and hybrid; the state at the start of a round for "
            "local_sgd) is included only in the peak. Mirrors are copies of another rank's state, "
            "so that a death loses nothing. The peak is the maximum that torch's allocator has "
            "allocated within a step, according to its profiler on the training thread, including "
            "activations and buffers of collectives. Bytes sent are read from the kernel (TCP_INFO "
            f"of every connection of the process, over {_STEPS} steps, the mean of the ranks), "
            "including heartbeats to the coordinator; for async_sgd, they are the bytes pushed and "
            "pulled. The ratios divide the measured values by the formulas."
        ),
        columns=(
            *("parameters", "gradients", "optimizer", "held, of formula"),
            *("mirrors", "peak", "sent", "sent, of formula", "sent to mirrors"),
        ),
        rows=tuple(rows),
        verdict=_verdict(rows),
    )


def _row(case: Case, ranks: int) -> Row:
    name = f"{case.name}, {ranks} ranks"
    more = ("--replicas", str(case.replicas(ranks)), "--options", json.dumps(dict(case.options)))
    flags = f"--nproc-per-node {ranks}" + (f" --servers {case.servers}" if case.servers else "")
    command = (
        f"shoal run --standalone {flags} -m benchmarks.workers.account --strategy "
        f"{case.strategy} {' '.join(more[:3])} '{more[3]}'"
    )
    try:
        account = Account.of(launch(case, ranks, more), with_received=bool(case.servers))
    except MeasurementError as error:
        return Row(name=name, command=command, cells={}, failure=str(error))
    roles = ("parameters", "gradients", "optimizer", "mirrors", "peak", "sent", "sent_to_mirrors")
    figures: dict[str, Sequence[float]] = {role: [getattr(account, role) / _MIB] for role in roles}
    cells = {role.replace("_", " "): f"{value[0]:.2f}" for role, value in figures.items()}
    for column, measured, formula in (
        ("held", account.held, case.held),
        ("sent", account.sent, case.sent),
    ):
        if formula is not None:
            share = measured / (formula(ranks) * account.model)
            figures[f"{column}_of_formula"], cells[f"{column}, of formula"] = (
                [share],
                f"{share:.3f}",
            )
    return Row(name=name, command=command, cells=cells, samples=figures)


def launch(case: Case, ranks: int, more: Sequence[str]) -> list[dict[str, float]]:
    with Stage() as stage:
        output: Path = stage.directory / "accounts"
        output.mkdir()
        sizes = ("--ranks", ranks, "--width", WIDTH, "--batch", case.batch, "--steps", _STEPS)
        words = ["--strategy", case.strategy, "--output", str(output), *more, *map(str, sizes)]
        system = start_account(stage, ranks=ranks, servers=case.servers, words=words)
        stage.finish(system.process, timeout_s=_TIMEOUT_S)
        accounts = [json.loads(file.read_text()) for file in sorted(output.glob("*.json"))]
        if len(accounts) != ranks:
            raise MeasurementError(
                f"{len(accounts)} of {ranks} ranks gave an account\n{stage.outputs()}"
            )
        return accounts


def _verdict(rows: Sequence[Row]) -> str:
    shares = {
        f"{row.name}: {column.removesuffix('_of_formula')} {values[0]:.2f} x": values[0]
        for row in rows
        for column, values in row.samples.items()
        if column.endswith("_of_formula")
    }
    if not shares:
        return "Not measured."
    above, below = (
        [text for text, share in shares.items() if sign * (share - 1) > TOLERANCE]
        for sign in (1, -1)
    )
    parts = [
        f"Measured: {len(shares) - len(above) - len(below)} of {len(shares)} figures are within "
        f"{TOLERANCE:.0%}"
    ]
    parts += [f"above the formula: {', '.join(above)}"] if above else []
    parts += [f"below the formula: {', '.join(below)}"] if below else []
    return "; ".join(parts) + "."
