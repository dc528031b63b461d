"""The parity matrix as data: strategies x backends x models x optimizers x worlds x checks.

The matrix is complete: each combination either trains as one process does, or `refusal` gives the
error that refuses it. Both the table in docs/parity.md (table.py) and the tests (test_parity.py)
are generated from these cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

MODELS: Final = ("mlp", "cnn", "gpt", "bag")
OPTIMIZERS: Final = ("sgd", "adamw")
WORLDS: Final = (2, 3, 4)
BACKENDS: Final = ("inmemory", "gloo", "mpi")
"""Backends that need no GPU."""
CHECKS: Final = {
    "float64": "in float64, the parameters agree with those of one process to 1e-10",
    "float32": "in float32, they agree to 1e-5",
    "bitwise": "with `deterministic=True`, float32 parameters and buffers are bitwise those of a "
    "world of one",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy, with the options that its cells use."""

    strategy: str
    says: str = ""
    """Description of the options, for the table."""
    options: Mapping[str, Any] = field(default_factory=dict)
    by_world: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Additional options by number of ranks."""
    worlds: tuple[int, ...] = WORLDS
    pipelined: bool = False
    """True if it is trained by train_step on whole batches, which it splits into micro-batches
    itself."""
    divided: bool = False
    """True if each rank has a part of a replica. Sums are then in a different order."""


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """One compressor, and the requirement for a training of 30 steps compared with one uncompressed
    process. Exactly one of the two bounds is set."""

    says: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    deviation: float | None = None
    """Largest allowed deviation of the parameters, relative to their total movement."""
    learned: float | None = None
    """Smallest allowed decrease of the loss, relative to the decrease without compression."""


ROWS: Final[Mapping[str, Row]] = {
    "ddp": Row(strategy="ddp"),
    "zero1": Row(strategy="zero1"),
    "zero2": Row(strategy="zero2"),
    "zero3": Row(strategy="zero3"),
    "fsdp": Row(strategy="fsdp"),
    "hsdp": Row(
        strategy="hsdp",
        says="2 ranks per replica, or 1 if there are 3",
        options={"shard_size": 2},
        by_world={3: {"shard_size": 1}},
    ),
    "tensor": Row(strategy="tensor", divided=True),
    "tensor_data": Row(
        strategy="tensor",
        says="2 x 2 replicas",
        options={"tensor_parallel_size": 2},
        worlds=(4,),
        divided=True,
    ),
    "pipeline": Row(
        strategy="pipeline", options={"micro_batches": 4}, pipelined=True, divided=True
    ),
    "pipeline_data": Row(
        strategy="pipeline",
        says="2 x 2 replicas, zero-bubble",
        options={
            "pipeline_parallel_size": 2,
            "micro_batches": 2,
            "schedule": "zero_bubble",
            "stages_per_rank": 1,
        },
        worlds=(4,),
        pipelined=True,
        divided=True,
    ),
    "hybrid": Row(
        strategy="hybrid",
        says="2 stages, with 4 ranks also 2 tensor-parallel parts",
        options={"pipeline_parallel_size": 2, "micro_batches": 4},
        by_world={4: {"tensor_parallel_size": 2}},
        worlds=(2, 4),
        pipelined=True,
        divided=True,
    ),
    "hybrid_zero1": Row(
        strategy="hybrid",
        says="2 x 2 replicas, sharded optimizer state",
        options={"tensor_parallel_size": 2, "data_parallel_strategy": "zero1"},
        worlds=(4,),
        divided=True,
    ),
    "hybrid_zero2": Row(
        strategy="hybrid",
        says="2 stages x 2 replicas, zero-bubble, gradients sharded too",
        options={
            "pipeline_parallel_size": 2,
            "micro_batches": 2,
            "schedule": "zero_bubble",
            "stages_per_rank": 1,
            "data_parallel_strategy": "zero2",
        },
        worlds=(4,),
        pipelined=True,
        divided=True,
    ),
    "hybrid_fsdp": Row(
        strategy="hybrid",
        says="2 x 2 replicas, parameters sharded too",
        options={"tensor_parallel_size": 2, "data_parallel_strategy": "fsdp"},
        worlds=(4,),
        divided=True,
    ),
    "local_sgd": Row(strategy="local_sgd", says="every 2 steps", options={"sync_every": 2}),
}
"""Strategies whose ranks take steps together, by the names of cells."""
ASYNC: Final = "async_sgd"
"""The strategy whose workers share servers and have no process group. A single worker trains as one
process does."""
SERVERS: Final = "servers"
"""Name used in place of a backend for strategies with parameter servers."""

_IN_ORDER = (
    'deterministic=True with strategy="async_sgd": pushes are applied in order of arrival, so '
    "results differ between runs"
)
_APART = (
    "with local_sgd, the result depends on the number of ranks that train independently; use "
    "ddp, zero1, zero2 or zero3"
)
_DIVIDED = (
    "splitting the model changes the order of sums, so results cannot be bitwise equal for "
    "other numbers of ranks"
)
_COME_AND_GO = "its workers and servers are separate processes; start them with `shoal run`"
_TWO_BLOCKS = "Bag has 2 blocks (bag, head); expected at least 1 stage and at most one per block"
_SCALED = (
    "a GradScaler with a pipeline: train_step itself runs the backward pass of each loss, so the "
    "script cannot scale the loss first"
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination."""

    row: str
    backend: str
    model: str
    optimizer: str
    world: int
    check: str

    @property
    def refusal(self) -> str | None:
        """Expected message of the ConfigurationError for this combination; None if it trains."""
        if self.row == ASYNC:
            if self.check == "bitwise":
                return _IN_ORDER
            return _COME_AND_GO if self.backend != SERVERS else None
        if self.check == "bitwise" and (self.row == "local_sgd" or ROWS[self.row].divided):
            return _APART if self.row == "local_sgd" else _DIVIDED
        return (
            _TWO_BLOCKS
            if (self.row, self.model) == ("pipeline", "bag") and self.world > 2
            else None
        )

    @property
    def strategy(self) -> str:
        """Argument of `as_distributed`."""
        return ROWS[self.row].strategy if self.row in ROWS else self.row

    @property
    def options(self) -> dict[str, Any]:
        """Argument of `as_distributed`."""
        row = ROWS.get(self.row, Row(strategy=self.row))
        return {
            **row.options,
            **row.by_world.get(self.world, {}),
            **({"deterministic": True} if self.check == "bitwise" else {}),
        }

    def __str__(self) -> str:
        return "-".join(map(str, asdict(self).values()))


def cells() -> list[Cell]:
    """Returns all cells. Refused combinations are tried with one optimizer."""
    product = [
        *(
            (row, *rest)
            for row in ROWS
            for rest in itertools.product(BACKENDS, MODELS, OPTIMIZERS, ROWS[row].worlds, CHECKS)
        ),
        *itertools.product([ASYNC], [SERVERS], MODELS, OPTIMIZERS, [1], CHECKS),
        *itertools.product([ASYNC], BACKENDS, MODELS[:1], OPTIMIZERS[:1], WORLDS[:1], CHECKS),
    ]
    names = ("row", "backend", "model", "optimizer", "world", "check")
    known = [Cell(**dict(zip(names, values, strict=True))) for values in product]
    return [cell for cell in known if cell.refusal is None or cell.optimizer == OPTIMIZERS[0]]


def part() -> set[Cell]:
    """Returns a subset that has every row on threads and on processes, every column, and for every
    model the rows that do not take long."""
    known, chosen = set(cells()), set()

    def choose(row: str, backend: str, model: str, turn: int, check: str) -> None:
        worlds = ROWS[row].worlds
        optimizer, world = OPTIMIZERS[turn // len(worlds) % 2], worlds[turn % len(worlds)]
        cell = Cell(
            row=row, backend=backend, model=model, optimizer=optimizer, world=world, check=check
        )
        if cell not in known:
            cell = Cell(
                row=row,
                backend=backend,
                model=model,
                optimizer=OPTIMIZERS[0],
                world=world,
                check=check,
            )
        chosen.add(cell)

    for (index, row), (column, model) in itertools.product(enumerate(ROWS), enumerate(MODELS)):
        if not ROWS[row].divided:
            choose(
                row, "inmemory", model, index + column, list(CHECKS)[(index + column) % len(CHECKS)]
            )
        elif column == index % len(MODELS):
            choose(row, "inmemory", model, index, "float64")
    for index, row in enumerate(ROWS):
        check = "float64" if ROWS[row].divided else list(CHECKS)[index // 2 % 2 * 2]
        choose(row, BACKENDS[1 + index % 2], MODELS[index % len(MODELS)], index, check)
    chosen.update(
        cell
        for cell in known
        if cell.row == ASYNC and cell.backend in BACKENDS and cell.check == "float64"
    )
    for column, model in enumerate(MODELS):
        check = list(CHECKS)[column % len(CHECKS)]
        chosen.add(
            Cell(
                row=ASYNC,
                backend=SERVERS,
                model=model,
                optimizer=OPTIMIZERS[column // 2],
                world=1,
                check=check,
            )
        )
    return chosen & known


_NOT_IN_PARTS = "use zero1, zero2, zero3, fsdp or hsdp, which shard the optimizer state"
_FLAT = (
    "Adafactor is not known to update each element independently, but this strategy splits "
    "parameters into flat pieces"
)
_WHOLE_BATCHES = (
    "deterministic=True needs micro-batches, whose results do not depend on the number of ranks"
)
_SPLIT = ("tensor", "tensor_data", "hybrid", "hybrid_zero1", "hybrid_fsdp")
_IN_SHARDS = ("zero1", "zero2", "zero3", "fsdp", "hsdp")
REFUSED_VARIATIONS: Final[Mapping[tuple[str, str], str]] = {
    **{
        (name, "sparse"): "EmbeddingBag with sparse=True needs the whole table on one rank"
        for name in _SPLIT
    },
    **{(name, "whole_matrices"): _FLAT for name in (*_SPLIT, "hybrid_zero2")},
    **{(name, "offload"): _NOT_IN_PARTS for name in ROWS if name not in _IN_SHARDS},
    **{
        (name, "param_dtype"): "compute under torch.autocast instead, or use zero1"
        for name in ROWS
        if name not in _IN_SHARDS
    },
    **{
        (name, "reduce_dtype"): 'use gradient_compression="bf16", or use zero1'
        for name in ROWS
        if name not in _IN_SHARDS
    },
    **{
        (
            name,
            "shard_modules",
        ): "use zero3, fsdp, hsdp or hybrid, which gather modules one by one, or leave "
        "shard_modules out"
        for name, row in ROWS.items()
        if row.strategy not in ("zero3", "fsdp", "hsdp", "hybrid")
    },
    **{
        (name, "shard_modules"): "gathers parameters module by module; leave shard_modules out"
        for name in ("hybrid", "hybrid_zero1", "hybrid_zero2")
    },
    **{
        (name, "whole_batches"): _DIVIDED if row.divided else _WHOLE_BATCHES
        for name, row in ROWS.items()
    },
    ("local_sgd", "whole_batches"): _APART,
    (
        "local_sgd",
        "sum",
    ): 'loss_reduction="sum": local_sgd averages parameters, not gradients; use a mean loss '
    'with loss_reduction="mean"',
    (
        "local_sgd",
        "by_hand",
    ): "auto_sync_gradients=False: local_sgd never synchronizes gradients; leave it out",
    **{(name, "scaler"): _SCALED for name, row in ROWS.items() if row.pipelined},
}
"""Message of the ConfigurationError by row and variation (variations.py)."""

COMPRESSORS: Final[Mapping[str, Compressed]] = {
    "fp16": Compressed(says="rounds to 2^-11", deviation=2**-11),
    "bf16": Compressed(says="rounds to 2^-8", deviation=2**-8),
    "int8": Compressed(says="127 levels, summed once, rounded twice", deviation=2 / 127),
    "topk": Compressed(says="10 % kept", settings={"ratio": 0.1}, learned=0.9),
    "randomk": Compressed(says="20 % kept", settings={"ratio": 0.2}, learned=0.8),
    "sign": Compressed(says="1 bit", learned=0.9),
    "powersgd": Compressed(says="rank 2", settings={"rank": 2}, learned=0.9),
}
"""Values of `gradient_compression=` by name."""


def refused_compression(row: str, compressor: str) -> str | None:
    """Returns the message of the ConfigurationError, or None if the strategy compresses."""
    strategy = ROWS[row].strategy
    if strategy not in ("ddp", "zero1", "zero2", "zero3", "fsdp"):
        return "use ddp, zero1, zero2, zero3, fsdp or async_sgd, or leave gradient_compression out"
    if compressor == "powersgd" and strategy != "ddp":
        return (
            "the compressor needs whole matrices on every rank, but this strategy shards "
            "gradients; use another compressor, such as topk or int8, or use ddp"
        )
    return None
