"""Evaluation mode for a while, after which every module is as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """`model` is in evaluation mode inside. Afterwards each of its modules has its own mode again: users freeze some, BatchNorms say, by
    `.eval()` on them alone, and `model.train()` would undo that."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
