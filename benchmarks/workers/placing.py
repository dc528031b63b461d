"""Where a worker computes, asked in one place: the host, or the CUDA device of its number on this machine; and over what it sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.workers.workload import Workload


def place(workload: Workload, number: int) -> torch.device:
    """The device of this machine's worker `number`, which torch's calls take from here on."""
    if workload.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def backend_of(device: torch.device) -> str:
    """What torch's own groups go over."""
    return "nccl" if device.type == "cuda" else "gloo"


def joining(device: torch.device) -> dict[str, Any]:
    """The arguments of `init_process_group`."""
    return {"backend": backend_of(device), **({"device_id": device} if device.type == "cuda" else {})}


def loading(device: torch.device) -> dict[str, Any]:
    """The arguments of a data loader whose batches go to the device."""
    return {"pin_memory": True} if device.type == "cuda" else {}


def settling(device: torch.device) -> Callable[[], None] | None:
    """What returns once the device has done all that it was told; None: the host has done it itself."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None
