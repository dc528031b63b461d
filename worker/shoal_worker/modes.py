"""Training and evaluation mode of modules. The mode is set through the modules' own methods,
because some modules do more in `train()` and `eval()` than set `training`: LoRA layers merge their
weights, for example."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

Modes = Sequence[tuple[nn.Module, bool]]
"""Modules, the outermost first, each with True if it is in training mode."""


def modes_of(model: nn.Module) -> Modes:
    """Returns the modes of `model` and of all its submodules."""
    return [(module, module.training) for module in model.modules()]


def set_modes(modes: Modes) -> None:
    """Sets each module's mode: first by `train(mode)` of the outermost module, then by
    `train(mode)` of each module whose mode still differs."""
    for number, (module, mode) in enumerate(modes):
        if number == 0 or module.training != mode:
            module.train(mode)
    for module, mode in modes:
        module.training = mode  # another module's train() may set it, or its own may not


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Sets `model` to evaluation mode within the context. Afterwards each submodule has its
    previous mode again: users freeze some, such as BatchNorms, by calling only their `.eval()`,
    which `model.train()` would undo."""
    modes = modes_of(model)
    model.eval()
    try:
        yield
    finally:
        set_modes(modes)
