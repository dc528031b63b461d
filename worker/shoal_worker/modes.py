"""Training and evaluation mode, set through the modules' own methods: some do more in `train()` and
`eval()` than set `training`, such as LoRA layers that merge their weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

Modes = Sequence[tuple[nn.Module, bool]]
"""Modules, the outermost first, and whether each is in training mode."""


def modes_of(model: nn.Module) -> Modes:
    """Returns the modes of `model` and of all modules in it."""
    return [(module, module.training) for module in model.modules()]


def set_modes(modes: Modes) -> None:
    """Sets each module's mode by `train(mode)` of the outermost one, and then of each module that
    differs."""
    for number, (module, mode) in enumerate(modes):
        if number == 0 or module.training != mode:
            module.train(mode)
    for module, mode in modes:
        module.training = mode  # one may be set by another's train(), or not heed its own


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts `model` into evaluation mode within the context. Afterwards each of its modules has its
    own mode again: users freeze some, such as BatchNorms, by calling `.eval()` on them only, and
    `model.train()` would undo that."""
    modes = modes_of(model)
    model.eval()
    try:
        yield
    finally:
        set_modes(modes)
