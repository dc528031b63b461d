"""Modules with extra state or with a `train()` of their own, for tests of several folders."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

KINDS = ("dict", "number", "tensor", "none")
"""Types of the extra state of a `Counter`."""


class Counter(nn.Module):
    """Counts its training passes in extra state whose type is given by `kind`."""

    def __init__(self, kind: str, seen: int = 0) -> None:
        super().__init__()
        self.kind, self.seen = kind, seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return x

    def get_extra_state(self) -> Any:
        return {
            "dict": {"seen": self.seen},
            "number": self.seen,
            "tensor": torch.tensor(float(self.seen)),
            "none": None,
        }[self.kind]

    def set_extra_state(self, state: Any) -> None:
        if self.kind != "none":
            self.seen = int(state["seen"] if self.kind == "dict" else state)


class Switched(nn.Module):
    """A layer that works only if its mode was set by its own `train()`."""

    evaluated: ClassVar[int] = 0
    """Passes in evaluation mode, including those of copies of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = True

    def train(self, mode: bool = True) -> Switched:
        self.mode = mode
        super().train(mode)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode is not self.training:
            raise AssertionError(f"training was set to {self.training} without train()")
        Switched.evaluated += not self.training
        return x
