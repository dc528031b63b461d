"""The module as the user wrote it, whole, beside this rank's part of it: for evaluation, for copies, and to stand in."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

from shoal_worker.mesh.blueprint import Template


def whole_module(
    template: Template, values: Mapping[str, torch.Tensor], unsaved: Mapping[str, torch.Tensor], device: torch.device
) -> nn.Module:
    """A new module with these values. `unsaved`: buffers that are no part of its state dict."""
    whole = copy.deepcopy(template.module).to_empty(device=device)
    for first, second in template.first_names.items():  # to_empty makes tied ones several
        owner, _, name = first.rpartition(".")
        source, _, own = second.rpartition(".")
        if first != second and first in template.tied_parameters:
            setattr(whole.get_submodule(owner), name, whole.get_submodule(source)._parameters[own])
    whole.load_state_dict(values)
    buffers = dict(whole.named_buffers())
    for name, value in unsaved.items():
        buffers[name].copy_(value)
    return whole


def zeros(template: Template) -> dict[str, torch.Tensor]:
    """Values for a module whose answers nobody uses: all nought."""
    tensors = template.tensors()
    return {key: torch.zeros(tensors[first].shape) for key, first in template.first_names.items()}
