"""Validated settings of a job's optimizer.

torch performs the updates (run_optimizer.py). The available optimizers, their hyperparameters and
their state are declared in `shoal_common.optimizers.for_servers`. Values that torch would reject
are rejected here, before any state has changed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final

import torch
from shoal_common.errors import InvalidRequestError
from shoal_common.optimizers.for_servers import (
    SERVER_OPTIMIZERS,
    Hyperparameters,
    OptimizerDeclaration,
    Unit,
)

from shoal_ps_server.shard.dtypes import ElementType
from shoal_ps_server.shard.layout import PartitionSpec, Piece

_CALM_HYPERPARAMETER: Final = 1e3
_CALM_EPS: Final = 1e-30
"""Smallest eps that is certain to keep Adam from dividing by zero."""
_CALM_GROWTH: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """A group of tensors with their own hyperparameters."""

    tensors: frozenset[str]
    hyperparameters: Mapping[str, float]
    """Hyperparameters given for the group. All others are taken from the optimizer."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Settings of a job's optimizer, created by `optimizer_settings`. Equal settings compare equal,
    whether or not defaults were given explicitly."""

    name: str
    hyperparameters: Hyperparameters
    """All hyperparameters of tensors that are not in a group."""
    groups: tuple[ParameterGroup, ...] = ()
    delay_compensation: float = 0.0
    """Strength of the compensation for stale gradients (compensation.py); 0: no compensation."""

    def place_of(self, tensor: str) -> int:
        """Returns the index of the parameter group that contains a tensor; -1 if none does."""
        return self._places.get(tensor, -1)

    def at(self, place: int) -> Hyperparameters:
        """Returns all hyperparameters of the group with index `place`; -1: of the tensors that are
        not in a group."""
        return (
            self.hyperparameters
            if place < 0
            else {**self.hyperparameters, **self.groups[place].hyperparameters}
        )

    def for_tensor(self, tensor: str) -> Hyperparameters:
        """Returns all hyperparameters of one tensor."""
        return self.at(self.place_of(tensor))

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {
            tensor: place for place, group in enumerate(self.groups) for tensor in group.tensors
        }

    def changed(
        self, hyperparameters: Mapping[str, float], groups: Iterable[ParameterGroup]
    ) -> OptimizerSettings:
        """Returns the settings after a step of the hyperparameter schedule. `hyperparameters`: new
        values for all tensors except those in `groups`, which contain their own values.

        Raises InvalidRequestError / OPTIMIZER_INVALID for unknown names, impossible values, unknown
        groups, and hyperparameters that cannot change because they determine which state is kept.
        """
        declared = SERVER_OPTIMIZERS[self.name]
        own = {group.tensors: group.hyperparameters for group in groups}
        known = {group.tensors for group in self.groups}
        for tensors in own:
            if tensors not in known:
                raise _invalid(
                    f"no parameter group was configured with the tensors {_shown(tensors)}; use "
                    "exactly a group's tensors"
                )
        for change in (hyperparameters, *own.values()):
            for name in declared.structural & change.keys():
                raise _invalid(
                    f"{name} determines the state of {self.name} and cannot be changed; set it in "
                    "ConfigureOptimizer"
                )
        return optimizer_settings(
            name=self.name,
            hyperparameters={**self.hyperparameters, **hyperparameters},
            groups=[
                replace(
                    group,
                    hyperparameters={
                        **group.hyperparameters,
                        **own.get(group.tensors, hyperparameters),
                    },
                )
                for group in self.groups
            ],
            delay_compensation=self.delay_compensation,
        )

    def check_pieces(self, specs: Iterable[PartitionSpec]) -> None:
        """Raises InvalidRequestError / OPTIMIZER_INVALID if a partition splits elements that this
        optimizer must update together."""
        declared = SERVER_OPTIMIZERS[self.name]
        for spec in specs:
            for piece in spec.pieces:
                if declared.cuts_rows(row=piece.row, offset=piece.offset, length=piece.length):
                    raise _invalid(
                        f"{self.name} updates whole rows, but a row of tensor "
                        f"{piece.tensor!r} has {piece.row} elements "
                        f"({piece.row * spec.element.itemsize} bytes), more than fit in a "
                        "partition; use adagrad, or reshape the tensor"
                    )

    def is_calm(self, places: Collection[int]) -> bool:
        """Returns whether updates of tensors in the groups `places` can be applied without a trial
        on a copy. With these hyperparameters, the update for a gradient of ordinary size is always
        finite, and updates do not make the values grow quickly."""
        declared = SERVER_OPTIMIZERS[self.name]
        return all(
            is_calm(values)
            and declared.growth(values) <= _CALM_GROWTH
            and not declared.always_tried(values)
            for values in map(self.at, places)
        )

    @cached_property
    def most_growth(self) -> float:
        """Largest factor, over all parameter groups, by which one update may multiply the norm of a
        tensor; 1 if an update only adds the gradient times the learning rate."""
        declared = SERVER_OPTIMIZERS[self.name]
        return max(declared.growth(self.at(place)) for place in range(-1, len(self.groups)))

    @cached_property
    def _most_state_tensors(self) -> int:
        """Maximum number of state tensors kept per tensor."""
        declared = SERVER_OPTIMIZERS[self.name]
        return max(declared.state_tensors(self.at(place)) for place in range(-1, len(self.groups)))

    @property
    def unit(self) -> Unit:
        """Granularity of the optimizer's updates: single elements, rows or complete tensors."""
        return SERVER_OPTIMIZERS[self.name].unit

    def most_state_bytes(self, pieces: Iterable[Piece], element: ElementType) -> int:
        """Returns the maximum size, in bytes, of the optimizer state for `pieces` of this element
        type."""
        itemsize = self.state_dtype(element).itemsize
        return (
            self._most_state_tensors * itemsize * sum(self.state_length(piece) for piece in pieces)
        )

    def state_length(self, piece: Piece) -> int:
        """Returns the number of elements of one state tensor for a piece."""
        return piece.length // piece.row if self.unit is Unit.ROW else piece.length

    def state_dtype(self, element: ElementType) -> torch.dtype:
        """Returns the dtype of the optimizer state for an element type. It is the same type, except
        that sums over rows have at least 32 bits, which costs little."""
        return torch.float32 if self.unit is Unit.ROW and element.itemsize < 4 else element.torch

    @property
    def state_names(self) -> frozenset[str]:
        """Names of the state tensors that the optimizer may keep for a partition."""
        return SERVER_OPTIMIZERS[self.name].state


def optimizer_settings(
    *,
    name: str,
    hyperparameters: Mapping[str, float],
    groups: Iterable[ParameterGroup] = (),
    tensors: frozenset[str] | None = None,
    delay_compensation: float = 0.0,
) -> OptimizerSettings:
    """Validates an optimizer from a request or a snapshot, and fills in the defaults.

    `tensors`: names that groups may contain; None: any. Raises InvalidRequestError /
    OPTIMIZER_INVALID for an unknown optimizer or hyperparameter, a value that torch would reject,
    and a tensor that does not exist or is in two groups.
    """
    declared = SERVER_OPTIMIZERS.get(name)
    if declared is None:
        raise _invalid(
            f"unknown optimizer {name!r}; expected one of {', '.join(sorted(SERVER_OPTIMIZERS))}"
        )
    checked = OptimizerSettings(
        name=name,
        hyperparameters=MappingProxyType(
            {**declared.defaults, **_known(declared, hyperparameters)}
        ),
        groups=tuple(
            ParameterGroup(
                tensors=group.tensors, hyperparameters=_known(declared, group.hyperparameters)
            )
            for group in groups
        ),
        delay_compensation=float(delay_compensation),
    )
    _check_values(declared, checked.hyperparameters)
    if not math.isfinite(delay_compensation) or delay_compensation < 0:
        raise _invalid(
            f"delay_compensation={delay_compensation}: expected a finite number, 0 (off) or above"
        )
    if delay_compensation and any(
        checked.at(place)["maximize"] for place in range(-1, len(checked.groups))
    ):
        raise _invalid(
            f"delay_compensation={delay_compensation} does not support maximize; negate the loss "
            "instead"
        )
    seen: set[str] = set()
    for group in checked.groups:
        if not group.tensors:
            raise _invalid("a parameter group has no tensors")
        if twice := seen & group.tensors:
            raise _invalid(f"tensors are in two parameter groups: {_shown(twice)}")
        if tensors is not None and (unknown := group.tensors - tensors):
            raise _invalid(
                f"a parameter group has tensors that the job has not declared: {_shown(unknown)}"
            )
        seen |= group.tensors
        _check_values(declared, {**checked.hyperparameters, **group.hyperparameters})
    return checked


def is_calm(values: Hyperparameters) -> bool:
    """Returns whether, with these hyperparameters, the update for a gradient of ordinary size is
    always finite."""
    return (
        all(value <= _CALM_HYPERPARAMETER for value in values.values())
        and values.get("momentum", 0.0) <= 1
        and values["lr"] * values.get("weight_decay", 0.0) <= 1
        and values.get("eps", 1.0) >= _CALM_EPS
    )


def _known(
    declared: OptimizerDeclaration, hyperparameters: Mapping[str, float]
) -> Mapping[str, float]:
    for name in hyperparameters:
        if name not in declared.defaults:
            raise _invalid(
                f"{declared.name} has no hyperparameter {name!r}; expected one of "
                f"{', '.join(declared.defaults)}"
            )
    return MappingProxyType({name: float(value) for name, value in sorted(hyperparameters.items())})


def _check_values(declared: OptimizerDeclaration, values: Hyperparameters) -> None:
    for name, value in values.items():
        if name in declared.switches:
            if value not in (0.0, 1.0):
                raise _invalid(f"{name}={value}: expected 0 or 1")
        elif not math.isfinite(value) or value < 0:
            raise _invalid(f"{name}={value}: expected a finite number, 0 or above")
        elif name in declared.below_one and value >= 1:
            raise _invalid(f"{name}={value}: expected a number in [0, 1)")
    if wrong := declared.contradiction(values):
        raise _invalid(wrong)


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, reason="OPTIMIZER_INVALID")


def _shown(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")
