"""Training and evaluation mode of modules. The mode is set by calling the modules' own `train()`
and `eval()`, because these methods do more than set `training` in some modules. LoRA layers, for
example, merge their weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

Modes = Sequence[tuple[nn.Module, bool]]
"""Pairs of a module and True if it is in training mode, outermost module first."""


def modes_of(model: nn.Module) -> Modes:
    """Returns the modes of `model` and all its submodules."""
    return [(module, module.training) for module in model.modules()]


def set_modes(modes: Modes) -> None:
    """Sets the mode of each module. Calls `train(mode)` of the outermost module first, and then of
    each module whose mode still differs."""
    for number, (module, mode) in enumerate(modes):
        if number == 0 or module.training != mode:
            module.train(mode)
    for module, mode in modes:
        module.training = mode  # train() of this or another module may have set a different mode


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which `model` is in evaluation mode. On exit, restores each submodule's previous
    mode. `model.train()` would not do that, because users may have put some submodules, such as
    BatchNorms, into evaluation mode permanently."""
    modes = modes_of(model)
    model.eval()
    try:
        yield
    finally:
        set_modes(modes)
