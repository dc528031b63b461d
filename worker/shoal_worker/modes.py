"""Training and evaluation mode of modules. The mode is set by calling the modules' own `train()`
and `eval()`, because some modules do more there than set `training`. LoRA layers, for example,
merge their weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

Modes = Sequence[tuple[nn.Module, bool]]
"""Modules, the outermost first, each with True if it is in training mode."""


def modes_of(model: nn.Module) -> Modes:
    """Returns `model` and all its submodules, each with True if it is in training mode."""
    return [(module, module.training) for module in model.modules()]


def set_modes(modes: Modes) -> None:
    """Sets the mode of each module. Calls `train(mode)` of the outermost module first, and then of
    each module whose mode still differs."""
    for number, (module, mode) in enumerate(modes):
        if number == 0 or module.training != mode:
            module.train(mode)
    for module, mode in modes:
        module.training = mode  # another module's train() may leave it unchanged, or its own may


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which `model` is in evaluation mode. Afterwards each submodule has its previous
    mode again. `model.train()` would not restore it, because users put some submodules, such as
    BatchNorms, into evaluation mode permanently."""
    modes = modes_of(model)
    model.eval()
    try:
        yield
    finally:
        set_modes(modes)
