"""Memory that collectives need again and again, kept between them.

What is freed to the system comes back as pages that the kernel has to clear first: for 64 MiB that takes longer than to receive them (docs/
decisions/0090). A few buffers are kept, for as long as their group. Threads: any.
"""

from __future__ import annotations

import threading
from typing import Final

import torch

_MOST: Final = 2
"""Buffers kept: so many collectives of one kind overlap."""


class Scratch:
    """Buffers that nobody uses at the moment."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of that dtype, shape and device, with any values."""
        with self._lock:
            fitting = [one for one in self._free if one.nbytes >= like.nbytes and one.device == like.device]
            found = min(fitting, key=lambda one: one.nbytes, default=None)
            if found is not None:
                self._free = [one for one in self._free if one is not found]
        if found is None:
            found = torch.empty(like.nbytes, dtype=torch.uint8, device=like.device)
        return found[: like.nbytes].view(like.dtype).view(like.shape)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Takes back what `take` gave, when nothing reads or writes it any more. The smallest is let go of when there are too many."""
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        with self._lock:
            self._free = sorted([*self._free, whole], key=lambda one: one.nbytes)[-_MOST:]
