"""A stand-in for host memory beside a device. Moving a tensor makes its old memory unusable."""

from __future__ import annotations

import torch


class MarkedMemory:
    """A `HostMemory` that marks its tensors and overwrites the source of each copy with invalid
    values."""

    def __init__(self, *, wanted: bool = False) -> None:
        self._wanted = wanted
        self.moves = 0

    def holds(self, tensor: torch.Tensor) -> bool:
        return getattr(tensor, "is_away", False)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        away = self._moved(tensor)
        away.is_away = True  # type: ignore[attr-defined]  # set by the stand-in
        return away

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.holds(tensor)
        return self._moved(tensor)

    def is_wanted(self) -> bool:
        return self._wanted

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        self.moves += 1
        moved = tensor.detach().clone()
        tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 77)
        return moved
