"""Per-parameter state of an optimizer: recognizes values with one element per element of the
parameter, and loads state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeGuard

import torch

from shoal_worker.state.fits import ELEMENTWISE

_ONE_NUMBER: Final = frozenset({"step", "mu_product", "eta", "mu"})
"""Names of the entries that contain one number per parameter in the state of torch.optim's
optimizers. For a parameter without dimensions (a temperature, a scale), moments have the same shape
as such a number, and differ only by name."""

_IN_THE_PARAMETERS_DTYPE: Final = ELEMENTWISE | {"Adafactor", "Muon"}
"""Optimizers of torch.optim that create their moments in the parameter's dtype."""


def is_element(value: object, key: str, shape: torch.Size) -> TypeGuard[torch.Tensor]:
    """Returns whether a value of the optimizer's state has one element for each element of the
    parameter, and is therefore sharded with it. True for moments, but not for step counts. `key`:
    the value's name in the state. `shape`: shape of the parameter, or of its local part."""
    return (
        isinstance(value, torch.Tensor)
        and value.shape == shape
        and (value.dim() > 0 or key not in _ONE_NUMBER)
    )


def strided_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns `value`, a moment or a gradient, with the strides of `parameter`. Strides are not
    preserved when a value is sent or saved. This matters because on a CPU, torch's fused optimizers
    iterate over a parameter, its gradient and its moments in memory order, regardless of their
    strides."""
    if value.layout is not torch.strided or value.stride() == parameter.stride():
        return value
    return torch.empty_like(
        parameter, dtype=value.dtype, device=value.device, requires_grad=False
    ).copy_(value)


def as_made_by(
    optimizer: torch.optim.Optimizer | None, value: Any, key: str, dtype: torch.dtype
) -> Any:
    """Converts a loaded value of the optimizer's state to the dtype that the optimizer would give
    it. `dtype`: dtype of the parameter. Optimizers of torch.optim create moments in the parameter's
    dtype and cannot use moments of another dtype, but the state may come from a run with a
    different dtype. Values of other optimizers are returned unchanged.
    """
    kind = type(optimizer)
    of_torch = (
        kind.__module__.startswith("torch.optim.") and kind.__name__ in _IN_THE_PARAMETERS_DTYPE
    )
    if not isinstance(value, torch.Tensor) or key in _ONE_NUMBER or not of_torch:
        return value
    return value.to(dtype) if value.is_floating_point() and dtype.is_floating_point else value


@torch.no_grad()
def load_optimizer(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, exact: bool
) -> None:
    """Loads a complete state dict into an optimizer of unsharded parameters. Moments get the memory
    layout of their parameters.

    torch's own `load_state_dict` converts everything except "step" to the parameter's dtype, even
    if the optimizer keeps it in a different dtype (float32 sums for bfloat16 parameters, integers,
    a running product). A rank that receives its peers' state would lose precision.

    Args:
        exact: True if the state was saved with parameters of the same dtypes. Its values then keep
        their dtypes. An optimizer with its own loading method handles this itself.
    """
    optimizer.load_state_dict(dict(state))
    exact = exact and type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    numbers = (number for group in state["param_groups"] for number in group["params"])
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for number, parameter in zip(numbers, parameters, strict=True):
        own, saved = optimizer.state.get(parameter, {}), state["state"].get(number, {})
        for key, value in own.items():
            if not isinstance(value, torch.Tensor):
                continue
            made = saved.get(key)
            if (
                exact
                and key != "step"
                and isinstance(made, torch.Tensor)
                and made.dtype != value.dtype
            ):
                value = made.to(value.device, copy=True)
            own[key] = (
                strided_like(value, parameter) if is_element(value, key, parameter.shape) else value
            )
