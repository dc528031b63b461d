"""Memory for a module that was built on the meta device, before it receives its values.

torch makes new tensors for that. An optimizer made from the old parameters would go on with those, and change nothing without a word;
modules that shared a tensor would have one each.

Buffers that are no part of state_dict (rotary frequencies, masks) get no value from one: whoever sends state to such a module sends
`unsaved_buffers` beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from shoal_common.errors import ConfigurationError
from torch import nn


def has_values(module: nn.Module) -> bool:
    """False while any parameter or buffer is on the meta device."""
    return not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def unsaved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that state_dict leaves out (persistent=False), by name."""
    saved = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name not in saved}


def materialize(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device, *, buffers: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Gives what is on the meta device memory on `device`, with any values in it, and moves the rest there.

    `optimizer` gets the new parameters; what was shared is shared again. `buffers`: a peer's `unsaved_buffers`, for those on the meta
    device.

    Raises:
        ConfigurationError: one of those is missing, or of another shape; nothing is changed.
    """
    given = _given(module, buffers or {})
    moved: dict[int, torch.Tensor] = {}
    for tensors, name, tensor in _places(module):
        if id(tensor) not in moved:
            moved[id(tensor)] = _on(device, tensor)
        tensors[name] = moved[id(tensor)]
    for group in optimizer.param_groups if optimizer is not None else ():
        group["params"] = [moved[id(parameter)] for parameter in group["params"]]
    own = dict(module.named_buffers(remove_duplicate=False))
    for name, value in given.items():
        own[name].copy_(value)


def _given(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values of the buffers that nothing else gives one."""
    wanted = {name: buffer for name, buffer in unsaved_buffers(module).items() if buffer.is_meta}
    for name, buffer in wanted.items():
        if name not in buffers or buffers[name].shape != buffer.shape:
            raise ConfigurationError(
                f"buffer {name!r} is on the meta device and no part of state_dict (persistent=False), and the state to load holds no value "
                "for it: build that buffer on the CPU, or register it as persistent"
            )
    return {name: buffers[name] for name in wanted}


def _on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    moved = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
    return nn.Parameter(moved, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def _places(module: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Where each parameter and buffer hangs; a shared one is there several times."""
    return [
        (tensors, name, tensor)
        for owner in module.modules()
        for tensors in (owner._parameters, owner._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
