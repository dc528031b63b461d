"""A stand-in for the way from a device into the host's memory: whatever can come late comes as late
as it may."""

from __future__ import annotations

from collections.abc import Callable

import torch


class LateLane:
    """A `Lane`. Bytes are copied when they are waited for, as they are then; until that their place
    holds something else."""

    def __init__(self, room: int = 1 << 40) -> None:
        self._room = room
        self.computed = False
        """The device has been waited for: what lies on it can be read."""
        self.sent = 0
        """Bytes that were asked for."""
        self.failed = False
        """The device is broken."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xAB, dtype=torch.uint8)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        assert self.computed, "something is read that the device has not computed yet"
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
