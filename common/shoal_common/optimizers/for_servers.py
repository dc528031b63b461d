"""Declarations of the optimizers that parameter servers support, by name.

A worker uses a declaration to extract the settings of a user's torch optimizer; a server uses it to
create an optimizer from these settings. Each hyperparameter is sent as a name and a number; a pair
in torch (`betas`) becomes two names, and a bool becomes 0 or 1. This module does not import torch:
classes are given by name and imported when they are used.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final

Hyperparameters = Mapping[str, float]
"""Name -> value, for every hyperparameter of the optimizer."""


class Unit(enum.Enum):
    """Granularity of an optimizer's updates."""

    ELEMENT = "element"
    """Each element is updated independently, so adjacent tensors can be merged."""
    ROW = "row"
    """The elements at one index of a tensor's first dimension are updated together; the state has
    one number per such row. Rows must not be split."""
    TENSOR = "tensor"
    """The elements of a tensor or, if it is split, of each piece are updated together."""


@dataclass(frozen=True, kw_only=True)
class OptimizerDeclaration:
    """Declaration of one optimizer: its hyperparameters, and how torch represents them."""

    name: str
    torch_class: str
    """Name of the class that computes the update. Its subclasses count as different optimizers,
    since they may override the update."""
    module: str = "torch.optim"
    """Module that contains the class."""
    unit: Unit = Unit.ELEMENT
    """Granularity of the update, which determines how a tensor may be split."""
    defaults: Hyperparameters
    """Default value of each hyperparameter, the same as in torch."""
    switches: frozenset[str] = frozenset()
    """Hyperparameters that are 0 or 1."""
    structural: frozenset[str] = frozenset()
    """Hyperparameters that determine which state the optimizer keeps. They cannot change once the
    optimizer has started."""
    below_one: frozenset[str] = frozenset()
    """Hyperparameters that must lie in [0, 1)."""
    pairs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Keys of a torch parameter group whose value consists of two hyperparameters."""
    state: frozenset[str]
    """Names of the state tensors that the optimizer may keep for a parameter."""
    state_tensors: Callable[[Hyperparameters], int]
    """Returns the number of state tensors with the given hyperparameters. Each has the parameter's
    size, or one number per row."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a torch parameter group that must have the given value."""
    fused_from_bytes: int | None = None
    """Minimum size of the values, in bytes, for torch's fused implementation; None: it is never
    used."""
    not_for: frozenset[str] = frozenset()
    """Numpy names of dtypes that make the optimizer produce NaN."""
    always_tried: Callable[[Hyperparameters], bool] = lambda values: False
    """Returns whether a valid update may produce NaN with these hyperparameters. If so, each update
    is first tried on a copy."""
    growth: Callable[[Hyperparameters], float] = lambda values: 1.0
    """Returns the largest factor by which one update may multiply the norm of a parameter, with
    these hyperparameters; 1 if an update only adds the gradient times the learning rate."""
    contradiction: Callable[[Hyperparameters], str] = lambda values: ""
    """Returns why values that are valid individually are invalid in combination; empty if they are
    valid."""

    def optimizer_class(self) -> Any:
        """Imports torch and returns the class that computes the update."""
        return getattr(import_module(self.module), self.torch_class)

    def cuts_rows(self, *, row: int, offset: int, length: int) -> bool:
        """Returns whether a piece of a tensor would start or end in the middle of a row although
        this optimizer needs complete rows.

        `row`: number of elements per row. `offset`, `length`: position and size of the piece, in
        elements.
        """
        return self.unit is Unit.ROW and bool(offset % row or length % row)

    def arguments(self, values: Hyperparameters) -> dict[str, Any]:
        """Returns the hyperparameters as the entries of a torch parameter group. Inverse of
        `read`."""
        paired = {name for names in self.pairs.values() for name in names}
        single = {
            name: bool(values[name]) if name in self.switches else values[name]
            for name in self.defaults
            if name not in paired
        }
        return single | {
            key: (values[first], values[second]) for key, (first, second) in self.pairs.items()
        }

    def read(self, group: Mapping[str, Any]) -> dict[str, float]:
        """Returns the hyperparameters in a torch parameter group. Inverse of `arguments`."""
        pairs = {
            name: value
            for key, names in self.pairs.items()
            for name, value in zip(names, group[key], strict=True)
        }
        return {
            name: float(pairs[name] if name in pairs else group[name]) for name in self.defaults
        }


def _nesterov_alone(values: Hyperparameters) -> str:
    if values["nesterov"] and (values["momentum"] <= 0 or values["dampening"] != 0):
        return (
            f"nesterov with momentum={values['momentum']} and dampening={values['dampening']}: "
            "expected momentum above 0 and dampening 0"
        )
    return ""


def _so_many_gradients(values: Hyperparameters) -> str:
    if values["every"] < 1 or values["every"] != int(values["every"]):
        return f"every={values['every']}: expected a whole number of gradients, at least 1"
    return ""


_EPS_VANISHES: Final = frozenset({"float16"})
"""Dtypes that round the usual eps of Adagrad and RMSprop to zero. torch then computes 0 / 0 for a
gradient of zero."""


def _moments(values: Hyperparameters) -> int:
    return 2 + int(values["amsgrad"])


SERVER_OPTIMIZERS: Final = {
    declaration.name: declaration
    for declaration in (
        OptimizerDeclaration(
            name="sgd",
            torch_class="SGD",
            defaults=MappingProxyType(
                {
                    "lr": 1e-3,
                    "momentum": 0.0,
                    "dampening": 0.0,
                    "weight_decay": 0.0,
                    "nesterov": 0.0,
                    "maximize": 0.0,
                }
            ),
            switches=frozenset({"nesterov", "maximize"}),
            state=frozenset({"momentum_buffer"}),
            state_tensors=lambda values: int(values["momentum"] != 0),
            # torch 2.13's fused SGD silently leaves 16-bit parameters on the CPU unchanged.
            fused_from_bytes=4,
            contradiction=_nesterov_alone,
        ),
        OptimizerDeclaration(
            name="adamw",
            torch_class="AdamW",
            defaults=MappingProxyType(
                {
                    "lr": 1e-3,
                    "beta1": 0.9,
                    "beta2": 0.999,
                    "eps": 1e-8,
                    "weight_decay": 1e-2,
                    "amsgrad": 0.0,
                    "maximize": 0.0,
                }
            ),
            switches=frozenset({"amsgrad", "maximize"}),
            structural=frozenset({"amsgrad"}),
            below_one=frozenset({"beta1", "beta2"}),
            pairs=MappingProxyType({"betas": ("beta1", "beta2")}),
            state=frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
            state_tensors=_moments,
            fixed=MappingProxyType({"decoupled_weight_decay": True}),
            # The fused variant is 4 times as fast here, and the only one whose eps is not rounded
            # to zero in float16.
            fused_from_bytes=0,
        ),
        OptimizerDeclaration(
            name="adam",
            torch_class="Adam",
            defaults=MappingProxyType(
                {
                    "lr": 1e-3,
                    "beta1": 0.9,
                    "beta2": 0.999,
                    "eps": 1e-8,
                    "weight_decay": 0.0,
                    "amsgrad": 0.0,
                    "maximize": 0.0,
                }
                | {"decoupled_weight_decay": 0.0}
            ),
            switches=frozenset({"amsgrad", "maximize", "decoupled_weight_decay"}),
            structural=frozenset({"amsgrad"}),
            below_one=frozenset({"beta1", "beta2"}),
            pairs=MappingProxyType({"betas": ("beta1", "beta2")}),
            state=frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
            state_tensors=_moments,
            fused_from_bytes=0,
        ),
        OptimizerDeclaration(
            name="adagrad",
            torch_class="Adagrad",
            defaults=MappingProxyType(
                {
                    "lr": 1e-2,
                    "lr_decay": 0.0,
                    "weight_decay": 0.0,
                    "initial_accumulator_value": 0.0,
                    "eps": 1e-10,
                    "maximize": 0.0,
                }
            ),
            switches=frozenset({"maximize"}),
            structural=frozenset({"initial_accumulator_value"}),
            state=frozenset({"step", "sum"}),
            state_tensors=lambda _: 1,
            fused_from_bytes=4,
            not_for=_EPS_VANISHES,
        ),
        OptimizerDeclaration(
            name="rmsprop",
            torch_class="RMSprop",
            defaults=MappingProxyType(
                {
                    "lr": 1e-2,
                    "alpha": 0.99,
                    "eps": 1e-8,
                    "weight_decay": 0.0,
                    "momentum": 0.0,
                    "centered": 0.0,
                    "maximize": 0.0,
                }
            ),
            switches=frozenset({"centered", "maximize"}),
            structural=frozenset({"centered", "momentum"}),
            below_one=frozenset({"alpha"}),
            state=frozenset({"step", "square_avg", "momentum_buffer", "grad_avg"}),
            state_tensors=lambda values: 1 + int(values["momentum"] > 0) + int(values["centered"]),
            not_for=_EPS_VANISHES,
            # It computes the square root of a difference, which can be negative because of
            # rounding.
            always_tried=lambda values: bool(values["centered"]),
        ),
        OptimizerDeclaration(
            name="lamb",
            torch_class="LAMB",
            module="shoal_common.optimizers.for_torch",
            unit=Unit.TENSOR,
            defaults=MappingProxyType(
                {
                    "lr": 1e-3,
                    "beta1": 0.9,
                    "beta2": 0.999,
                    "eps": 1e-6,
                    "weight_decay": 0.0,
                    "maximize": 0.0,
                }
            ),
            switches=frozenset({"maximize"}),
            below_one=frozenset({"beta1", "beta2"}),
            pairs=MappingProxyType({"betas": ("beta1", "beta2")}),
            state=frozenset({"step", "exp_avg", "exp_avg_sq"}),
            state_tensors=lambda _: 2,
            # The norm of a step is the learning rate times the norm of the values, however small
            # the gradient is.
            growth=lambda values: 1 + values["lr"],
        ),
        OptimizerDeclaration(
            name="rowwise_adagrad",
            torch_class="RowWiseAdagrad",
            module="shoal_common.optimizers.for_torch",
            unit=Unit.ROW,
            defaults=MappingProxyType(
                {
                    "lr": 1e-2,
                    "weight_decay": 0.0,
                    "initial_accumulator_value": 0.0,
                    "eps": 1e-10,
                    "maximize": 0.0,
                }
            ),
            switches=frozenset({"maximize"}),
            structural=frozenset({"initial_accumulator_value"}),
            state=frozenset({"sum"}),
            state_tensors=lambda _: 1,
        ),
        OptimizerDeclaration(
            name="delayed_nesterov",
            torch_class="DelayedNesterov",
            module="shoal_common.optimizers.for_torch",
            defaults=MappingProxyType(
                {"lr": 0.7, "momentum": 0.9, "every": 1.0, "weight_decay": 0.0, "maximize": 0.0}
            ),
            switches=frozenset({"maximize"}),
            below_one=frozenset({"momentum"}),
            state=frozenset({"step", "momentum_buffer", "gradient_sum"}),
            state_tensors=lambda _: 2,
            contradiction=_so_many_gradients,
        ),
    )
}
"""Optimizers of parameter servers, by their names in requests."""

SPARSE_ADAM: Final = OptimizerDeclaration(
    name="sparse_adam",
    torch_class="SparseAdam",
    defaults=MappingProxyType(
        {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "maximize": 0.0}
    ),
    switches=frozenset({"maximize"}),
    below_one=frozenset({"beta1", "beta2"}),
    pairs=MappingProxyType({"betas": ("beta1", "beta2")}),
    state=frozenset({"step", "exp_avg", "exp_avg_sq"}),
    state_tensors=lambda _: 2,
    contradiction=lambda values: (
        "" if values["lr"] > 0 and values["eps"] > 0 else "sparse_adam needs lr and eps above 0"
    ),
)
"""Adam that changes neither the rows without a gradient nor their moments. It is made for sparse
gradients and therefore suits tables."""

TABLE_OPTIMIZERS: Final = {
    **{name: SERVER_OPTIMIZERS[name] for name in ("sgd", "adagrad", "rowwise_adagrad")},
    SPARSE_ADAM.name: SPARSE_ADAM,
}
"""Optimizers for the rows of sparse tables: torch's optimizers for sparse gradients, and Shoal's
row-wise ones."""


def in_words() -> str:
    """Returns a human-readable list of the supported optimizer classes: "torch.optim.SGD and
    shoal.optim.LAMB"."""
    # modules under which users import them
    homes = {"shoal_common.optimizers.for_torch": "shoal.optim"}
    *others, last = [
        f"{homes.get(each.module, each.module)}.{each.torch_class}"
        for each in SERVER_OPTIMIZERS.values()
    ]
    return f"{', '.join(others)} and {last}"
