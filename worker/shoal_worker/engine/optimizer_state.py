"""What an optimizer keeps of each parameter beside its settings: which of it belongs to the
parameter's elements, and how it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeGuard

import torch

from shoal_worker.state.fits import ELEMENTWISE

_ONE_NUMBER: Final = frozenset({"step", "mu_product", "eta", "mu"})
"""Names under which optimizers of torch.optim keep one number for a whole parameter. Of a parameter
without dimensions (a temperature, a scale) moments have that shape too, and only the name tells
them apart."""

_IN_THE_PARAMETERS_DTYPE: Final = ELEMENTWISE | {"Adafactor", "Muon"}
"""Optimizers of torch.optim that make their moments in the dtype of the parameter."""


def is_element(value: object, key: str, shape: torch.Size) -> TypeGuard[torch.Tensor]:
    """Whether a value of the optimizer's state belongs to the elements of a tensor (a moment), and
    is cut as that is; step counts and the like do not. `key`: its name in the state. `shape`: of
    the parameter, or of what is here of it."""
    return (
        isinstance(value, torch.Tensor)
        and value.shape == shape
        and (value.dim() > 0 or key not in _ONE_NUMBER)
    )


def strided_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`value`, a moment or a gradient of the shape of `parameter`, with the strides of that. From a
    peer or a file it has lost them; and on a CPU torch's fused optimizers go through a parameter,
    its gradient and its moments in the order in which each lies in memory, whatever their
    strides."""
    if value.layout is not torch.strided or value.stride() == parameter.stride():
        return value
    return torch.empty_like(
        parameter, dtype=value.dtype, device=value.device, requires_grad=False
    ).copy_(value)


def as_made_by(
    optimizer: torch.optim.Optimizer | None, value: Any, key: str, dtype: torch.dtype
) -> Any:
    """A value of a state that is loaded, for a parameter of `dtype`. The state may be of a run
    whose parameters had another: optimizers of torch.optim make moments in the parameter's, and
    cannot go on with others. Those of others make them as they like."""
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
    """Loads a whole state dict into an optimizer of whole parameters. Moments lie in memory as
    their parameters do.

    torch brings all but "step" to the parameter's dtype, whatever the optimizer had made: sums in
    float32 for parameters in bfloat16, whole numbers, a running product. A rank that is given its
    peers' state must not go on with less than they have.

    Args:
        exact: it is of parameters of the same dtypes, so what the optimizer made is kept. One that
            loads in its own way knows what it keeps.
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
