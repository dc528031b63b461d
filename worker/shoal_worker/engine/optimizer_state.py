"""What an optimizer keeps of each parameter beside its settings: which of it belongs to the parameter's elements, and how it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeGuard

import torch

_ONE_NUMBER: Final = frozenset({"step", "mu_product", "eta", "mu"})
"""Names under which optimizers of torch.optim keep one number for a whole parameter. Of a parameter without dimensions (a temperature, a
scale) moments have that shape too, and only the name tells them apart."""


def is_element(value: object, key: str, shape: torch.Size) -> TypeGuard[torch.Tensor]:
    """Whether a value of the optimizer's state belongs to the elements of a tensor (a moment), and is cut as that is; step counts and the
    like do not. `key`: its name in the state. `shape`: of the parameter, or of what is here of it."""
    return isinstance(value, torch.Tensor) and value.shape == shape and (value.dim() > 0 or key not in _ONE_NUMBER)


def strided_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`value`, a moment or a gradient of the shape of `parameter`, with the strides of that. From a peer or a file it has lost them;
    and on a CPU torch's fused optimizers go through a parameter, its gradient and its moments in the order in which each lies in memory,
    whatever their strides."""
    if value.layout is not torch.strided or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


@torch.no_grad()
def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Loads a whole state dict into an optimizer of whole parameters, with moments that lie in memory as their parameters do."""
    optimizer.load_state_dict(dict(state))
    for parameter, own in optimizer.state.items():
        for key, value in own.items():
            if isinstance(parameter, torch.Tensor) and is_element(value, key, parameter.shape):
                own[key] = strided_like(value, parameter)
