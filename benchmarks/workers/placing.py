"""Selects the device on which a worker computes (the host, or the CUDA device with the worker's
local rank), and the communication backend that it uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.workers.shared_gpu import pass_for_a_machine
from benchmarks.workers.workload import SHARED, Workload


def place(workload: Workload, number: int) -> torch.device:
    """Returns the device of a worker, and makes it torch's current device. `number`: index of the
    worker on this machine."""
    if workload.device == "cpu":
        return torch.device("cpu")
    if workload.device == SHARED:
        pass_for_a_machine()
    device = torch.device("cuda", 0 if workload.device == SHARED else number)
    torch.cuda.set_device(device)
    return device


def join(workload: Workload) -> torch.device:
    """Joins Shoal's job and returns the device of this worker."""
    import shoal  # workers of other systems do without

    if workload.device == SHARED:
        pass_for_a_machine()
    shoal.init()
    return torch.device("cpu") if workload.device == "cpu" else shoal.device()


def backend_of(device: torch.device) -> str:
    """Returns the name of the backend for process groups on this device."""
    return "nccl" if device.type == "cuda" else "gloo"


def joining(device: torch.device) -> dict[str, Any]:
    """Returns arguments for `init_process_group`."""
    return {
        "backend": backend_of(device),
        **({"device_id": device} if device.type == "cuda" else {}),
    }


def loading(device: torch.device) -> dict[str, Any]:
    """Returns arguments for a data loader whose batches are moved to the device."""
    return {"pin_memory": True} if device.type == "cuda" else {}


def settling(device: torch.device) -> Callable[[], None] | None:
    """Returns a function that blocks until the device has completed all queued work. Returns None
    for the host, which has no queue."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None
