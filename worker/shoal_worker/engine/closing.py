"""The closing of a step: one small all-reduce after which every rank knows the same of it. `partitioned.py` says what follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(kw_only=True)
class Closing:
    """What all ranks know of a step once it is closed. Travels to ranks that missed it."""

    number: int
    """Which step of this model it is, from 1."""
    divisor: float
    """What the summed gradients are divided by."""
    squared_norm: float
    """Squared norm of the gradients, before the divisor."""

    @property
    def norm(self) -> float:
        """Norm of the gradients that were handed out; NaN if they are not finite."""
        return math.sqrt(self.squared_norm) / self.divisor if math.isfinite(self.squared_norm) else math.nan


@dataclass(kw_only=True)
class CutClosing(Closing):
    """The closing of a model that is cut over all ranks: every rank has a piece of each parameter."""

    present: list[bool]
    """For each trained parameter: some rank used it."""
    changes: torch.Tensor
    """Changes of the buffers, the mean over the ranks."""


class ClosingSum:
    """What the ranks add up: vectors of float64, one after the other, equally long on all ranks."""

    def __init__(self, *parts: torch.Tensor | Sequence[float]) -> None:
        self._parts = [torch.as_tensor(part, dtype=torch.float64) for part in parts]

    def to_send(self, device: torch.device | str) -> torch.Tensor:
        """For the all-reduce."""
        return torch.cat(self._parts).to(device)

    def split(self, summed: torch.Tensor) -> Sequence[torch.Tensor]:
        """The sums of the parts, on the CPU."""
        parts: Sequence[torch.Tensor] = summed.cpu().split([len(part) for part in self._parts])
        return parts
