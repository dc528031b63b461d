"""Parameters that users give, and what is to be true of a model's own before it is trained."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.nn.parameter import is_lazy


def named_values(parameters: torch.Tensor | Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """What `with_parameters` was given, by name; `own`: the model's whole parameters in order.

    Raises:
        ConfigurationError: a name, a shape or the number of elements does not fit.
    """
    given = _unflatten_vector(parameters, own) if isinstance(parameters, torch.Tensor) else dict(parameters)
    unknown = sorted(set(given) - set(own))
    if unknown:
        raise ConfigurationError(f"with_parameters: the model has no parameters {unknown[:5]}")
    for name, value in given.items():
        if value.shape != own[name].shape:
            raise ConfigurationError(f"with_parameters: {name!r} has shape {tuple(value.shape)}, the model's has {tuple(own[name].shape)}")
    return given


def _unflatten_vector(vector: torch.Tensor, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    total = sum(p.numel() for p in own.values())
    if vector.dim() != 1 or vector.numel() != total:
        raise ConfigurationError(f"with_parameters: expected a flat vector of {total} elements, got shape {tuple(vector.shape)}")
    return dict(
        zip(own, (v.view_as(p) for v, p in zip(vector.split([p.numel() for p in own.values()]), own.values(), strict=True)), strict=True)
    )


def check_optimizer_covers(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigurationError: the optimizer holds tensors that are not parameters of the module."""
    own = {id(p) for p in module.parameters()}
    foreign = sum(1 for group in optimizer.param_groups for p in group["params"] if id(p) not in own)
    if foreign:
        raise ConfigurationError(
            f"the optimizer holds {foreign} tensor(s) that are not parameters of the model; make it from the same model's parameters()"
        )


def check_trains(module: nn.Module) -> None:
    """Raises ConfigurationError: no parameter of the module is to be trained."""
    if not any(p.requires_grad for p in module.parameters()):
        raise ConfigurationError("the model has no parameter with requires_grad=True: there is nothing to train")


def check_shaped(module: nn.Module) -> None:
    """Raises ConfigurationError: a parameter or buffer of the module gets its shape in the first forward pass."""
    if any(is_lazy(t) for t in (*module.parameters(), *module.buffers())):
        raise ConfigurationError("the model has lazy parameters without a shape: run one batch through it before as_distributed")
