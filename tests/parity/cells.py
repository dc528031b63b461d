"""The parity matrix as data: strategies x backends x models x optimizers x worlds x what is compared.

There is no hole: a combination either trains as one process does, or `refusal` says with what one error it is refused. The table in
docs/parity.md is made from this (table.py), and the tests from the same cells (test_parity.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

MODELS: Final = ("mlp", "cnn", "gpt", "bag")
OPTIMIZERS: Final = ("sgd", "adamw")
WORLDS: Final = (2, 3, 4)
BACKENDS: Final = ("inmemory", "gloo", "mpi")
"""Those that need no GPU."""
CHECKS: Final = {
    "float64": "in float64 the parameters are those of one process, to 1e-10",
    "float32": "in float32 they are, to 1e-5",
    "bitwise": "with `deterministic=True` parameters and buffers in float32 are bitwise those of a world of one",
}
STRATEGIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "ddp": {},
    "zero1": {},
    "zero2": {},
    "zero3": {},
    "fsdp": {},
    "local_sgd": {"sync_every": 2},
}
"""Those that take steps together, with the options that the cells give them."""
ASYNC: Final = "async_sgd"
"""Its workers share servers, and no process group: one worker alone trains as one process does."""
SERVERS: Final = "servers"
"""What stands in the place of its backend."""

_COME_AND_GO = "its workers and servers are processes that come and go; start them with `shoal run`"
_IN_ORDER = 'deterministic=True with strategy="async_sgd": pushes are applied in the order in which they come'
_APART = "with local_sgd the result depends on how many ranks train apart; use ddp, zero1, zero2 or zero3"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination."""

    strategy: str
    backend: str
    model: str
    optimizer: str
    world: int
    check: str

    @property
    def refusal(self) -> str | None:
        """What the ConfigurationError says that this combination gets; None: it trains."""
        if self.strategy == ASYNC:
            if self.check == "bitwise":
                return _IN_ORDER
            return _COME_AND_GO if self.backend != SERVERS else None
        if self.strategy == "local_sgd" and self.check == "bitwise":
            return _APART
        return None

    @property
    def options(self) -> dict[str, Any]:
        """Of `as_distributed`."""
        return {**STRATEGIES.get(self.strategy, {}), **({"deterministic": True} if self.check == "bitwise" else {})}

    def __str__(self) -> str:
        return "-".join(map(str, asdict(self).values()))


def cells() -> list[Cell]:
    """All of them."""
    product = [
        *itertools.product(STRATEGIES, BACKENDS, MODELS, OPTIMIZERS, WORLDS, CHECKS),
        *itertools.product([ASYNC], [SERVERS], MODELS, OPTIMIZERS, [1], CHECKS),
        *itertools.product([ASYNC], BACKENDS, MODELS[:1], OPTIMIZERS[:1], WORLDS[:1], CHECKS),
    ]
    names = ("strategy", "backend", "model", "optimizer", "world", "check")
    return [Cell(**dict(zip(names, values, strict=True))) for values in product]


def part() -> set[Cell]:
    """A part that has every strategy with every model and every backend, and all of the other columns."""
    chosen = set()
    for (row, strategy), (column, model) in itertools.product(enumerate(STRATEGIES), enumerate(MODELS)):
        turn = row + column
        for number, check in enumerate(CHECKS):
            if check == "float32" and column != row % len(MODELS):
                continue
            chosen.add(_cell(strategy, "inmemory", model, turn + number, check))
    for (row, strategy), (number, backend) in itertools.product(enumerate(STRATEGIES), enumerate(BACKENDS[1:])):
        turn = row + number
        chosen.add(_cell(strategy, backend, MODELS[turn % len(MODELS)], turn, list(CHECKS)[turn % 2 * 2]))
    chosen.update(cell for cell in cells() if cell.strategy == ASYNC and cell.backend in BACKENDS and cell.check == "float64")
    for column, model in enumerate(MODELS):
        optimizer, check = OPTIMIZERS[column % len(OPTIMIZERS)], list(CHECKS)[column % len(CHECKS)]
        chosen.add(Cell(strategy=ASYNC, backend=SERVERS, model=model, optimizer=optimizer, world=1, check=check))
    return chosen


def _cell(strategy: str, backend: str, model: str, turn: int, check: str) -> Cell:
    optimizer, world = OPTIMIZERS[turn // len(WORLDS) % 2], WORLDS[turn % len(WORLDS)]
    return Cell(strategy=strategy, backend=backend, model=model, optimizer=optimizer, world=world, check=check)


REFUSED_VARIATIONS: Final[Mapping[tuple[str, str], str]] = {
    ("local_sgd", "sum"): 'loss_reduction="sum": local_sgd averages parameters, not gradients; let the loss be a mean',
    ("local_sgd", "by_hand"): "auto_sync_gradients=False: local_sgd never synchronizes gradients; leave it out",
}
"""By strategy and variation (variations.py): what the ConfigurationError says."""
