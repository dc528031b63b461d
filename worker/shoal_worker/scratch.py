"""Reusable memory for collectives: buffers for sending and receiving that are kept from step to
step.

The kernel maps newly allocated memory with one page fault per 4 KiB. For large buffers, these page
faults take longer than compressing data into the buffer.

`in_host_memory` also selects between two implementations of some operations: numpy is faster on the
CPU, and other devices need torch."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch


def in_host_memory(device: torch.device) -> bool:
    """Returns whether tensors on the device are in host memory, where numpy can access them."""
    return device.type == "cpu"


class ScratchMemory:
    """Pool of memory blocks that are currently unused. Thread-safe."""

    def __init__(self, *, most: int | None = None) -> None:
        """`most`: maximum number of blocks that the pool keeps; None: no limit."""
        self._most = most
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns an uninitialized tensor. Its memory is the smallest unused block that is large
        enough, or a new block."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            fitting = (
                index
                for index, one in enumerate(self._free)
                if one.nbytes >= size and one.device == device
            )
            index = next(fitting, None)  # blocks are sorted by size
            block = self._free.pop(index) if index is not None else None
        if block is None:
            block = torch.empty(size, dtype=torch.uint8, device=device)
        return block[:size].view(dtype).view(shape)

    def give_back(self, *tensors: torch.Tensor) -> None:
        """Returns the memory of tensors from `take` to the pool, and frees excess blocks, the
        smallest first. Nothing may access the tensors any more. After a failed collective, this
        method must not be called, because the transport may still write to them."""
        blocks = [
            torch.empty(0, dtype=torch.uint8, device=one.device).set_(one.untyped_storage())
            for one in tensors
        ]
        with self._lock:
            self._free = sorted([*self._free, *blocks], key=lambda one: one.nbytes)
            if self._most is not None:
                self._free = self._free[-self._most :]
