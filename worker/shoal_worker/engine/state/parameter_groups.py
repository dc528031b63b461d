"""Divides parameters into units. The parameters of a unit are gathered, used and freed together, or
their gradients are reduced together. This module also makes submodules recompute their activations
in the backward pass.

Small units need more collectives, and large units more memory: if parameters are sharded, a unit is
unsharded in memory while it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")

# -------------------------------------------------------------- activations that are computed again

_FORWARD = "forward"


def checkpoint_activations(
    module: nn.Module, chosen: bool | Sequence[type[nn.Module]] | Callable[[nn.Module], bool]
) -> None:
    """Makes the chosen submodules recompute their activations in the backward pass instead of
    keeping them. `chosen`: see `ShardingConfiguration.activation_checkpointing`. Leaves submodules
    that already do so unchanged.

    Raises:
        ConfigurationError: the model does not contain the chosen submodules.
    """
    if chosen is False:
        return
    modules = dict(module.named_modules())
    if chosen is True:
        found = [modules[name] for name in repeated(modules, at_least=1)]
        wanted = (
            "True: no container of the model repeats a class of modules with parameters; pass a "
            "list of classes"
        )
    elif isinstance(chosen, Sequence):
        found = [each for each in modules.values() if isinstance(each, tuple(chosen))]
        wanted = (
            f"{[each.__name__ for each in chosen]}: the model has no module of these classes; "
            "pass classes of its modules"
        )
    else:
        found = [each for each in modules.values() if chosen(each)]
        wanted = f"{chosen!r}: the function selected no module of the model"
    if not found:
        raise ConfigurationError(f"activation_checkpointing={wanted}")
    for each in found:
        if not isinstance(each.__dict__.get(_FORWARD), functools.partial):
            setattr(each, _FORWARD, functools.partial(_forward, each.forward))


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Returns a module's forward pass without activation checkpointing; None if the module has no
    activation checkpointing."""
    chosen = module.__dict__.get(_FORWARD)
    return (
        chosen.args[0]
        if isinstance(chosen, functools.partial) and chosen.func is _forward
        else None
    )


def check_forward_passes(module: nn.Module, strategy: str) -> None:
    """Checks that all parts of the module use the forward pass of their class; otherwise, for
    example after `layer.forward = ...`, raises ConfigurationError. Layers are split according to
    their classes, so a replaced `forward` would not be called. A copy of a module with a replaced
    `forward` would use the parameters of the original."""
    for name, part in module.named_modules():
        compiled = "_orig_mod" in part._modules  # by torch.compile; copying may also create it
        if _FORWARD in part.__dict__ and own_forward(part) is None and not compiled:
            raise ConfigurationError(
                f"module {name!r} ({type(part).__name__}) has its own forward() (module.forward = "
                f"...), which strategy={strategy!r} would not call, because layers are split "
                "according to their class. Define forward() in a class, or use a strategy that "
                "splits no layers (ddp, zero1, zero2, zero3, fsdp)"
            )


def _forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


# -------------------------------------------------------------------------------------------- units


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that are gathered, used and freed, or reduced, as one unit."""

    name: str
    """Name of the module, or of its first parameter."""
    module: nn.Module
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]


def by_modules(
    module: nn.Module, shard_modules: Sequence[type[nn.Module] | str] | None, *, at_least: int
) -> list[ParameterGroup]:
    """Returns a group for each module in `shard_modules` (classes, or names of submodules), after a
    first group for all other parameters.

    `shard_modules=None` selects the children of containers in which a class occurs repeatedly (the
    blocks of a transformer), if they have at least `at_least` elements. A parameter shared by
    several units belongs to the first group. Groups are in the order of `named_modules`. Parameters
    of a nested module with its own group are not in the outer module's group.

    Raises:
        ConfigurationError: the model does not contain one of the names or classes.
    """
    modules = dict(module.named_modules())
    chosen = (
        set(_named(modules, shard_modules))
        if shard_modules is not None
        else set(repeated(modules, at_least))
    )
    chosen.discard("")
    owner: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        home = _enclosing(name, chosen)
        # A parameter shared by several units belongs to the outermost one.
        owner[id(parameter)] = home if owner.get(id(parameter), home) == home else ""
    groups = []
    for home in ["", *(name for name in modules if name in chosen)]:
        own = {name: p for name, p in module.named_parameters() if owner[id(p)] == home}
        if own:
            groups.append(
                ParameterGroup(
                    name=home,
                    module=modules[home],
                    names=tuple(own),
                    parameters=tuple(own.values()),
                )
            )
    if not groups or groups[0].name:
        groups.insert(0, ParameterGroup(name="", module=module, names=(), parameters=()))
    return groups


def in_buckets(items: Iterable[T], size: Callable[[T], int], cap: float) -> list[list[T]]:
    """Divides items into buckets whose total size is at most `cap`, preserving their order. An item
    larger than `cap` gets a bucket of its own."""
    buckets: list[list[T]] = []
    filled = 0
    for item in items:
        if not buckets or filled + size(item) > cap:
            buckets.append([])
            filled = 0
        buckets[-1].append(item)
        filled += size(item)
    return buckets


def by_bytes(module: nn.Module, cap: int) -> list[ParameterGroup]:
    """Divides the parameters into groups of at most `cap` bytes, preserving their order. A larger
    parameter gets a group of its own."""
    groups = []
    for named in in_buckets(module.named_parameters(), lambda one: one[1].nbytes, cap) or [[]]:
        names, parameters = (
            tuple(name for name, _ in named),
            tuple(parameter for _, parameter in named),
        )
        groups.append(
            ParameterGroup(
                name=names[0] if names else "", module=module, names=names, parameters=parameters
            )
        )
    return groups


def alike(group: ParameterGroup) -> Iterable[ParameterGroup]:
    """Splits a group by dtype and by whether parameters are trained. The parameters of each
    resulting group can be stored in one flat vector and reduced in one collective."""
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for index, parameter in enumerate(group.parameters):
        kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append(index)
    for indices in kinds.values():
        yield ParameterGroup(
            name=group.name,
            module=group.module,
            names=tuple(group.names[i] for i in indices),
            parameters=tuple(group.parameters[i] for i in indices),
        )


def _enclosing(name: str, chosen: set[str]) -> str:
    """Returns the name of the innermost of the `chosen` modules that contains the parameter `name`;
    empty if none does."""
    path = name.split(".")[:-1]
    while path:
        if ".".join(path) in chosen:
            return ".".join(path)
        path.pop()
    return ""


def _named(modules: dict[str, nn.Module], wanted: Sequence[type[nn.Module] | str]) -> Iterable[str]:
    for want in wanted:
        found = [want] if isinstance(want, str) and want in modules else []
        if isinstance(want, type):
            found = [name for name, module in modules.items() if isinstance(module, want)]
        if not found:
            known = sorted({type(m).__name__ for m in modules.values()})
            raise ConfigurationError(
                f"shard_modules={want!r}: the model has no such module; its module classes are "
                f"{', '.join(known[:12])}"
            )
        yield from found


def repeated(modules: dict[str, nn.Module], at_least: int) -> Iterable[str]:
    """Yields the names of submodules whose class occurs repeatedly in the same container and that
    have at least `at_least` elements each, such as the blocks of a transformer."""
    for name, module in modules.items():
        if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        children = dict(module.named_children())
        classes = [type(child) for child in children.values()]
        for child_name, child in children.items():
            large = sum(p.numel() for p in child.parameters()) >= at_least
            if large and (classes.count(type(child)) > 1):
                yield f"{name}.{child_name}" if name else child_name
