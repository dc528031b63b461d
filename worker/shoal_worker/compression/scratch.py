"""Buffers that collectives send from and receive into, kept from step to step.

Fresh memory of this size costs a page fault for every 4 KiB, which takes longer than compressing into it. Belongs to the training thread.

Which of two ways to take: the CPU has quicker ones than torch's general operations for some things, a device only has those.
"""

from __future__ import annotations

import torch


def in_host_memory(device: torch.device) -> bool:
    """Tensors there can be seen as numpy arrays."""
    return device.type == "cpu"


class Scratch:
    """Keeps as many buffers of a size as were ever in use at once."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.device], list[torch.Tensor]] = {}

    def take(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """Bytes that hold anything."""
        free = self._free.get((rows * columns, device))
        flat = free.pop() if free else torch.empty(rows * columns, dtype=torch.uint8, device=device)
        return flat.view(rows, columns)

    def give(self, *buffers: torch.Tensor) -> None:
        """They are free again. Not to be called for buffers of a collective that failed: the transport may still write into them."""
        for buffer in buffers:
            self._free.setdefault((buffer.numel(), buffer.device), []).append(buffer.view(-1))
