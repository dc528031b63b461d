"""The server's optimizer: what a job asked for, checked, and made into one `torch.optim` instance per partition.

The arithmetic is torch's; this module only knows which hyperparameters an optimizer takes, which values torch would refuse (so that a
request is refused before anything changed), and which state tensors it keeps (for snapshots). Adding an optimizer is one `_Kind` more.

Nothing here is shared: an `OptimizerSettings` is a value, and a built optimizer belongs to the thread that owns its partition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import torch
from shoal_common.errors import InvalidRequestError

Hyperparameters = Mapping[str, float]
"""Name -> value, with every name that the optimizer has. Switches are 0 or 1."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    name: str
    defaults: Hyperparameters
    """torch's own."""
    switches: frozenset[str]
    """Hyperparameters that are 0 or 1."""
    structural: frozenset[str]
    """Those that decide which state is kept, and so cannot change once it runs."""
    below_one: frozenset[str]
    """Those that must lie in [0, 1)."""
    state: frozenset[str]
    """Names of the state tensors that it may keep per partition."""
    arguments: Callable[[Hyperparameters], dict[str, Any]]
    """Hyperparameters -> keys of a torch parameter group."""
    build: Callable[[torch.Tensor, dict[str, Any]], torch.optim.Optimizer]


def _sgd_arguments(values: Hyperparameters) -> dict[str, Any]:
    return {
        "lr": values["lr"],
        "momentum": values["momentum"],
        "dampening": values["dampening"],
        "weight_decay": values["weight_decay"],
        "nesterov": bool(values["nesterov"]),
        "maximize": bool(values["maximize"]),
    }


def _build_sgd(value: torch.Tensor, arguments: dict[str, Any]) -> torch.optim.Optimizer:
    # torch 2.13's fused SGD leaves 16-bit parameters on the CPU unchanged, without a word (tests/unit/ps_server/test_optimizer.py).
    return torch.optim.SGD([value], fused=value.element_size() >= 4, **arguments)


def _adamw_arguments(values: Hyperparameters) -> dict[str, Any]:
    return {
        "lr": values["lr"],
        "betas": (values["beta1"], values["beta2"]),
        "eps": values["eps"],
        "weight_decay": values["weight_decay"],
        "amsgrad": bool(values["amsgrad"]),
        "maximize": bool(values["maximize"]),
    }


def _build_adamw(value: torch.Tensor, arguments: dict[str, Any]) -> torch.optim.Optimizer:
    # Fused is 4 times faster here, and the only form whose eps survives in float16.
    return torch.optim.AdamW([value], fused=True, **arguments)


_KINDS: Final = {
    kind.name: kind
    for kind in (
        _Kind(
            name="sgd",
            defaults=MappingProxyType(
                {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0.0, "maximize": 0.0}
            ),
            switches=frozenset({"nesterov", "maximize"}),
            structural=frozenset(),
            below_one=frozenset(),
            state=frozenset({"momentum_buffer"}),
            arguments=_sgd_arguments,
            build=_build_sgd,
        ),
        _Kind(
            name="adamw",
            defaults=MappingProxyType(
                {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": 0.0, "maximize": 0.0}
            ),
            switches=frozenset({"amsgrad", "maximize"}),
            structural=frozenset({"amsgrad"}),
            below_one=frozenset({"beta1", "beta2"}),
            state=frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
            arguments=_adamw_arguments,
            build=_build_adamw,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Tensors whose hyperparameters differ from the rest."""

    tensors: frozenset[str]
    hyperparameters: Mapping[str, float]
    """Those that were named; the others are the optimizer's."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """A job's optimizer: equal settings compare equal, however many defaults were spelled out. Made by `optimizer_settings`."""

    name: str
    hyperparameters: Hyperparameters
    """All of the optimizer's, for tensors in no group."""
    groups: tuple[ParameterGroup, ...] = ()

    def for_tensor(self, tensor: str) -> Hyperparameters:
        """All hyperparameters that hold for one tensor."""
        for group in self.groups:
            if tensor in group.tensors:
                return {**self.hyperparameters, **group.hyperparameters}
        return self.hyperparameters

    def changed(self, hyperparameters: Mapping[str, float], groups: Iterable[ParameterGroup]) -> OptimizerSettings:
        """The settings after a schedule's step: `hyperparameters` go to every group but those in `groups`, which get their own.

        Raises InvalidRequestError / OPTIMIZER_INVALID on unknown names, impossible values, groups that were never configured, and changes
        of hyperparameters that decide which state is kept.
        """
        kind = _KINDS[self.name]
        own = {group.tensors: group.hyperparameters for group in groups}
        known = {group.tensors for group in self.groups}
        for tensors in own:
            if tensors not in known:
                raise _invalid(f"no parameter group was configured with the tensors {_shown(tensors)}: name exactly a group's tensors")
        for change in (hyperparameters, *own.values()):
            for name in kind.structural & change.keys():
                raise _invalid(f"{name} decides which state {self.name} keeps and cannot change: set it in ConfigureOptimizer")
        return optimizer_settings(
            name=self.name,
            hyperparameters={**self.hyperparameters, **hyperparameters},
            groups=[
                replace(group, hyperparameters={**group.hyperparameters, **own.get(group.tensors, hyperparameters)})
                for group in self.groups
            ],
        )

    def build(self, value: torch.Tensor, *, tensor: str) -> torch.optim.Optimizer:
        """An optimizer for one partition's values, cut from `tensor`; it changes them in place."""
        kind = _KINDS[self.name]
        return kind.build(value, kind.arguments(self.for_tensor(tensor)))

    def retune(self, optimizer: torch.optim.Optimizer, *, tensor: str) -> None:
        """Puts these hyperparameters into an optimizer that was built with earlier ones; its state stays."""
        optimizer.param_groups[0].update(_KINDS[self.name].arguments(self.for_tensor(tensor)))

    @property
    def state_names(self) -> frozenset[str]:
        """Names of the state tensors that this optimizer may keep per partition."""
        return _KINDS[self.name].state


def optimizer_settings(
    *, name: str, hyperparameters: Mapping[str, float], groups: Iterable[ParameterGroup] = (), tensors: frozenset[str] | None = None
) -> OptimizerSettings:
    """Checks an optimizer as a request or a snapshot names it, and fills in the defaults.

    `tensors`: the names that groups may use; None: any. Raises InvalidRequestError / OPTIMIZER_INVALID: an optimizer or hyperparameter that
    does not exist, a value that torch would refuse, a tensor that does not exist or is in two groups.
    """
    kind = _KINDS.get(name)
    if kind is None:
        raise _invalid(f"there is no optimizer {name!r}: expected one of {', '.join(sorted(_KINDS))}")
    checked = OptimizerSettings(
        name=name,
        hyperparameters=MappingProxyType({**kind.defaults, **_known(kind, hyperparameters)}),
        groups=tuple(ParameterGroup(tensors=group.tensors, hyperparameters=_known(kind, group.hyperparameters)) for group in groups),
    )
    _check_values(kind, checked.hyperparameters)
    seen: set[str] = set()
    for group in checked.groups:
        if not group.tensors:
            raise _invalid("a parameter group names no tensors")
        if twice := seen & group.tensors:
            raise _invalid(f"tensors in two parameter groups: {_shown(twice)}")
        if tensors is not None and (unknown := group.tensors - tensors):
            raise _invalid(f"a parameter group names tensors that the job has not declared: {_shown(unknown)}")
        seen |= group.tensors
        _check_values(kind, {**checked.hyperparameters, **group.hyperparameters})
    return checked


def warm_up() -> None:
    """Call once at the start: torch imports its compiler, for a second, when a process makes its first optimizer. No push should wait for
    that."""
    optimizer_settings(name="sgd", hyperparameters={}).build(torch.zeros(1), tensor="")


def _known(kind: _Kind, hyperparameters: Mapping[str, float]) -> Mapping[str, float]:
    for name in hyperparameters:
        if name not in kind.defaults:
            raise _invalid(f"{kind.name} has no hyperparameter {name!r}: expected some of {', '.join(kind.defaults)}")
    return MappingProxyType({name: float(value) for name, value in sorted(hyperparameters.items())})


def _check_values(kind: _Kind, values: Hyperparameters) -> None:
    for name, value in values.items():
        if name in kind.switches:
            if value not in (0.0, 1.0):
                raise _invalid(f"{name}={value}: expected 0 or 1")
        elif not math.isfinite(value) or value < 0:
            raise _invalid(f"{name}={value}: expected a finite number, 0 or above")
        elif name in kind.below_one and value >= 1:
            raise _invalid(f"{name}={value}: expected a number in [0, 1)")
    if values.get("nesterov") and (values["momentum"] <= 0 or values["dampening"] != 0):
        raise _invalid(f"nesterov needs momentum above 0 and no dampening, not {values['momentum']} and {values['dampening']}")


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, reason="OPTIMIZER_INVALID")


def _shown(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")
