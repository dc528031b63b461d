"""Declaration of a sparse table: its initialization, optimizer and eviction, with validation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from shoal_protos.v1 import coordinator_pb2

from shoal_common.optimizers.for_servers import TABLE_OPTIMIZERS, OptimizerDeclaration

INITIALIZERS: Final = ("uniform", "normal", "zeros")
DEFAULT_BUCKETS: Final = 16
MOST_BUCKETS: Final = 1024
LARGEST_ROW_BYTES: Final = 64 << 10
_LIMITLESS: Final = 1 << 62
"""Exclusive upper bound for limits on rows and ages."""
_ROW_UNCHANGED: Final = ("momentum", "dampening", "nesterov", "weight_decay")
"""Hyperparameters that must be 0. Otherwise, they would change rows without a gradient, and every
step would have to update all rows."""


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """Declaration of a sparse table, without its name and shape. `contradiction` checks the
    values."""

    buckets: int = DEFAULT_BUCKETS
    """Number of partitions of the table. A row's partition is determined by a hash of its id."""
    seed: int
    """Seed of the initial values, 0 to 2**64 - 1."""
    initializer: str
    """Distribution of the initial values, one of INITIALIZERS."""
    scale: float
    """Scale of the initial values. uniform: values are in [-scale, scale); normal: the standard
    deviation; zeros: 0."""
    optimizer: str
    """Name of the optimizer, a key of TABLE_OPTIMIZERS."""
    hyperparameters: tuple[tuple[str, float], ...] = ()
    """All of the optimizer's hyperparameters as (name, value), sorted by name; `with_defaults`
    fills them in."""
    max_age: int = 0
    """A row is evicted once it has not been updated by this many consecutive pushes to its bucket;
    0: rows are not evicted by age."""
    max_rows: int = 0
    """Maximum number of rows in the table, divided equally among its buckets; 0: unlimited."""

    @property
    def declared(self) -> OptimizerDeclaration:
        """Declaration of the table's optimizer."""
        return TABLE_OPTIMIZERS[self.optimizer]

    @property
    def most_rows(self) -> int:
        """Maximum number of rows in one bucket; 0: unlimited."""
        return self.max_rows // self.buckets

    @classmethod
    def with_defaults(
        cls, *, optimizer: str, hyperparameters: Mapping[str, float], **others: Any
    ) -> TableSpec:
        """Creates a specification with all hyperparameters, so that equal tables compare equal. If
        the optimizer is unknown, keeps only the given hyperparameters."""
        declared = TABLE_OPTIMIZERS.get(optimizer)
        values = {
            **(declared.defaults if declared is not None else {}),
            **{name: float(value) for name, value in hyperparameters.items()},
        }
        return cls(optimizer=optimizer, hyperparameters=tuple(sorted(values.items())), **others)

    @classmethod
    def of_message(cls, message: coordinator_pb2.TableSpec) -> TableSpec:
        """Converts a message, valid or not, to a specification with all hyperparameters."""
        return cls.with_defaults(
            buckets=message.buckets,
            seed=message.seed,
            initializer=message.initializer,
            scale=message.scale,
            optimizer=message.optimizer,
            hyperparameters=message.hyperparameters,
            max_age=message.max_age,
            max_rows=message.max_rows,
        )

    def message(self) -> coordinator_pb2.TableSpec:
        """Converts the specification to a message."""
        return coordinator_pb2.TableSpec(
            **{**asdict(self), "hyperparameters": dict(self.hyperparameters)}
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TableSpec:
        """Restores a specification from the result of `to_json`. Raises KeyError, TypeError or
        ValueError."""
        pairs = tuple((str(name), float(number)) for name, number in value["hyperparameters"])
        return cls(**{**value, "hyperparameters": pairs})

    def to_json(self) -> dict[str, Any]:
        """Converts the specification to JSON-compatible values."""
        return asdict(self)

    def contradiction(self) -> str:
        """Returns what is wrong with the first invalid field (its name, its value and the
        expectation); empty if all fields are valid."""
        if not 1 <= self.buckets <= MOST_BUCKETS:
            return f"buckets={self.buckets}: expected 1 to {MOST_BUCKETS}"
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 64:
            return f"seed={self.seed}: expected a whole number, 0 to 2**64 - 1"
        if self.initializer not in INITIALIZERS:
            return f"initializer={self.initializer!r}: expected one of {', '.join(INITIALIZERS)}"
        if not (math.isfinite(self.scale) and 0 <= self.scale <= 1e6) or (
            self.initializer == "zeros" and self.scale
        ):
            return (
                f"scale={self.scale} with initializer={self.initializer!r}: expected 0 to 1e6, "
                "and 0 with zeros"
            )
        if not 0 <= self.max_age < _LIMITLESS:
            return (
                f"max_age={self.max_age}: expected a number of pushes below 2**62, or 0 for no "
                "limit"
            )
        if not 0 <= self.max_rows < _LIMITLESS or 0 < self.max_rows < self.buckets:
            return (
                f"max_rows={self.max_rows}: expected at least {self.buckets} (one per bucket), or "
                "0 for no limit"
            )
        return self._wrong_optimizer()

    def _wrong_optimizer(self) -> str:
        if self.optimizer not in TABLE_OPTIMIZERS:
            return (
                f"optimizer={self.optimizer!r}: expected one of {', '.join(TABLE_OPTIMIZERS)} "
                "for the rows of a table"
            )
        declared = self.declared
        for name, value in self.hyperparameters:
            if name not in declared.defaults:
                return (
                    f"{declared.name} has no hyperparameter {name!r}; expected one of "
                    f"{', '.join(declared.defaults)}"
                )
            if name in _ROW_UNCHANGED and value:
                return (
                    f"{name}={value}: expected 0 for a table, since it would change rows without a "
                    "gradient"
                )
            if name in declared.switches and value not in (0.0, 1.0):
                return f"{name}={value}: expected 0 or 1"
            if not math.isfinite(value) or value < 0:
                return f"{name}={value}: expected a finite number, 0 or above"
            if name in declared.below_one and value >= 1:
                return f"{name}={value}: expected a number in [0, 1)"
        return declared.contradiction(dict(self.hyperparameters))


def wrong_shape(shape: tuple[int, ...]) -> str:
    """Returns what is wrong with a table's shape; empty if the shape is valid."""
    if len(shape) != 2 or shape[0] < 0 or not 1 <= shape[1] * 4 <= LARGEST_ROW_BYTES:
        return (
            f"shape {list(shape)}: expected [rows, dim] with rows 0 for any 64-bit id, and dim 1 "
            f"to {LARGEST_ROW_BYTES // 4}"
        )
    return ""
