"""Which of two ways to take: the CPU has quicker ones than torch's general operations for some things, a device only has those."""

from __future__ import annotations

import torch


def in_host_memory(device: torch.device) -> bool:
    """Tensors there can be seen as numpy arrays."""
    return device.type == "cpu"
