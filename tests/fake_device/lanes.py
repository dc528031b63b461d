"""A stand-in for the copy engine between a device and host memory: every copy is as late as
allowed."""

from __future__ import annotations

from collections.abc import Callable

import torch


class LateLane:
    """A `Lane` that copies bytes only when they are waited for. Until then, the target has other
    contents."""

    def __init__(self, room: int = 1 << 40) -> None:
        self._room = room
        self.computed = False
        """True once the device has been waited for, so that its tensors may be read."""
        self.sent = 0
        """Number of bytes whose copies were requested."""
        self.failed = False
        """True if the device is broken."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xAB, dtype=torch.uint8)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        assert self.computed, "a tensor is read before the device has computed it"
        assert len(source) == len(target)
        self.sent += len(source)
        target.fill_(0xEE)
        return lambda: self._arrive(source, target)

    def fence(self) -> Callable[[], object]:
        return self._compute

    def room(self) -> int:
        return self._room

    def _compute(self) -> None:
        self.computed = True

    def _arrive(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self.failed:
            raise RuntimeError("CUDA error: unspecified launch failure")
        target.copy_(source)
