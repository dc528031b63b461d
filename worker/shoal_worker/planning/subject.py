"""The subject of a plan: a model and its optimizer. Only their sizes matter, so the model is on the
meta device.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from shoal_common.errors import ConfigurationError
from torch import nn

from shoal_worker.config import ShardingConfiguration
from shoal_worker.engine.state.parameter_groups import ParameterGroup, checkpoint_activations
from shoal_worker.engine.step.passes import Loss
from shoal_worker.mesh.layouts import meta_copy
from shoal_worker.planning.traced_passes import Passes, measure
from shoal_worker.sharding.engine import in_blocks, in_buckets
from shoal_worker.state.fits import WHOLE_TENSORS


@dataclass(frozen=True, kw_only=True)
class StateSize:
    """Size of the state that an optimizer keeps for one parameter."""

    per_element: float
    """Bytes per element of the parameter, for those parts of the state that have the parameter's
    shape or grow with it."""
    fixed: int
    """Bytes of all other state for the parameter, such as a step count."""

    def of(self, elements: int) -> float:
        """Returns the size of the state for a parameter of `elements` elements, in bytes."""
        return self.per_element * elements + self.fixed if elements else 0.0


NO_STATE = StateSize(per_element=0.0, fixed=0)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model on the meta device, with the sizes and properties that a plan needs."""

    module: nn.Module
    """The model, on the meta device."""
    config: ShardingConfiguration
    state: Mapping[str, StateSize]
    """Size of the optimizer's state for each parameter, by name."""
    optimizer: str
    """Name of the optimizer's class."""
    passes: Passes | None
    """Measurements of the passes; None if no example inputs were given."""
    buffer_bytes: int
    shared_buffer_elements: int
    """Number of elements of the buffers that the ranks combine in each step: statistics and
    counters."""

    @functools.cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters of the model, by name. Shared parameters appear once."""
        return dict(self.module.named_parameters())

    @functools.cached_property
    def blocks(self) -> list[ParameterGroup]:
        """Groups of parameters that are gathered together under strategies that shard parameters.
        The group of the outermost module comes first."""
        return in_blocks(self.module, self.config)

    @functools.cached_property
    def buckets(self) -> list[ParameterGroup]:
        """Groups of parameters that are reduced together under strategies that do not shard
        parameters."""
        return in_buckets(self.module, self.config)

    @functools.cached_property
    def trained(self) -> dict[str, nn.Parameter]:
        """Trained parameters, by name."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    @property
    def whole_tensors(self) -> bool:
        """True if the optimizer needs entire tensors. With sharded state, each tensor is then
        assigned to one rank."""
        return self.optimizer in WHOLE_TENSORS

    def state_of(self, name: str) -> StateSize:
        """Returns the size of the optimizer's state for a parameter."""
        return self.state.get(name, NO_STATE)


def subject_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: ShardingConfiguration,
    *,
    inputs: Any,
    targets: Any,
    loss_fn: Loss | None,
) -> Subject:
    """Determines the sizes of a model and its optimizer. Does not change either.

    Raises:
        ConfigurationError: there is nothing to train, the optimizer belongs to a different model or
            cannot be stepped, or the example cannot be passed through the model on fake tensors.
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"plan: model={type(model).__name__}: expected a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"plan: optimizer={type(optimizer).__name__}: expected a torch.optim.Optimizer over "
            "the model's parameters"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigurationError(
            f"plan: {type(model).__name__} has no parameter with requires_grad=True, so there is "
            "nothing to train"
        )
    module = meta_copy(model)
    checkpoint_activations(module, config.activation_checkpointing)
    persistent = {id(t) for t in module.state_dict(keep_vars=True).values()}
    buffers = list(module.buffers())
    return Subject(
        module=module,
        config=config,
        state=_state_sizes(model, module, optimizer),
        optimizer=type(optimizer).__name__,
        passes=None if inputs is None else measure(module, inputs, targets, loss_fn),
        buffer_bytes=sum(b.nbytes for b in buffers),
        shared_buffer_elements=sum(
            b.numel()
            for b in buffers
            if (b.is_floating_point() and id(b) in persistent) or b.dtype == torch.int64
        ),
    )


def _state_sizes(
    model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, StateSize]:
    """Returns the size of the optimizer's state for each parameter, by name."""
    names = {id(p): name for name, p in model.named_parameters()}
    foreign = sum(id(p) not in names for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ConfigurationError(
            f"plan: {foreign} parameter(s) of the {type(optimizer).__name__} do not belong to "
            "the model; create the optimizer from model.parameters() of the planned model"
        )
    shapes = dict(module.named_parameters())
    known: dict[tuple[torch.Size, torch.dtype, int], StateSize] = {}
    sizes: dict[str, StateSize] = {}
    for number, group in enumerate(optimizer.param_groups):
        for name in (names[id(p)] for p in group["params"]):
            parameter = shapes[name]
            key = parameter.shape, parameter.dtype, number
            if parameter.requires_grad and key not in known:
                known[key] = _state_size(optimizer, group, parameter)
            sizes[name] = known.get(key, NO_STATE)
    return sizes


def _state_size(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: nn.Parameter
) -> StateSize:
    """Returns the size of the state that the optimizer has for one parameter after a step. Takes
    the step with a copy of the optimizer, on a meta tensor or, if the optimizer needs values, on
    zeros."""
    try:
        state = _stepped(optimizer, group, nn.Parameter(torch.empty_like(like, device="meta")))
    except Exception:  # its code may raise anything for a meta tensor
        try:
            state = _stepped(optimizer, group, nn.Parameter(torch.zeros_like(like, device="cpu")))
        except Exception as error:
            raise ConfigurationError(
                f"plan: {type(optimizer).__name__} could not take a step with zero gradients "
                f"({type(error).__name__}: {error}), so the size of its state is unknown; plan "
                "with an optimizer of torch.optim that keeps a state of the same size"
            ) from error
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    growing = sum(t.nbytes for t in tensors if t.dim())
    return StateSize(
        per_element=growing / max(1, like.numel()),
        fixed=sum(t.nbytes for t in tensors if not t.dim()),
    )


def _stepped(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: nn.Parameter
) -> Mapping[str, Any]:
    own = copy.copy(optimizer)
    own.state = defaultdict(dict)
    own.param_groups = [{**group, "params": [parameter]}]
    parameter.grad = torch.zeros_like(parameter)
    own.step()
    state: Mapping[str, Any] = own.state.get(parameter, {})
    return state
