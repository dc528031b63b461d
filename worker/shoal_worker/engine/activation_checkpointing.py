"""Modules that compute their activations again in the backward pass, instead of keeping them.

The module's `forward` is what is checkpointed, so its name, its parameters' names and its class stay, and hooks on it run once: sharded
parameters are gathered around the recomputation as around any backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal_worker.engine.parameter_groups import repeated

_FORWARD = "forward"


def checkpoint_activations(module: nn.Module, chosen: bool | Sequence[type[nn.Module]] | Callable[[nn.Module], bool]) -> None:
    """Checkpoints the submodules that are `chosen`: see `ShardingConfiguration.activation_checkpointing`. Those that are already stay so.

    Raises:
        ConfigurationError: the model has none of them.
    """
    if chosen is False:
        return
    modules = dict(module.named_modules())
    if chosen is True:
        found = [modules[name] for name in repeated(modules, at_least=1)]
        wanted = "True: no container of the model repeats a class of modules with parameters; name classes"
    elif isinstance(chosen, Sequence):
        found = [each for each in modules.values() if isinstance(each, tuple(chosen))]
        wanted = f"{[each.__name__ for each in chosen]}: the model has no module of these classes"
    else:
        found = [each for each in modules.values() if chosen(each)]
        wanted = f"{chosen!r}: it chose no module of the model"
    if not found:
        raise ConfigurationError(f"activation_checkpointing={wanted}")
    for each in found:
        if not isinstance(each.__dict__.get(_FORWARD), functools.partial):
            setattr(each, _FORWARD, functools.partial(_forward, each.forward))


def _forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
