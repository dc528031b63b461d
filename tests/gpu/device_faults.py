"""Faults of a device during a step that a worker causes itself: an illegal memory access, and
running out of memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from shoal_common.exit_status import EVICTED
from shoal_worker.backends.process_end import end_now
from torch import nn

_PASS: Final = 7
"""Number of the forward pass in which the fault occurs."""
_TOO_MUCH: Final = 1 << 50
"""Number of bytes that neither a host nor a device has."""
_KERNEL: Final = (
    "template <typename T> T dereference(T x) { return x + *reinterpret_cast<volatile T*>(8); }"
)


def arm(fault: str, block: nn.Module, marker: Path) -> None:
    """Makes `fault`, a key of `FAULTS`, occur in a later forward pass of `block`.

    It occurs once among all processes with the same file `marker`, so that a replacement continues
    without it.
    """
    passes = 0

    def before(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal passes
        passes += 1
        if passes == _PASS and not marker.exists():
            marker.touch()
            FAULTS[fault](inputs[0].device)

    block.register_forward_pre_hook(before)


def access_illegally(device: torch.device) -> None:
    """Starts a kernel that reads address 8. The host notices the error later.

    On the host, the function ends the process with the exit status that Shoal uses for such an
    error.
    """
    if device.type == "cpu":
        end_now(EVICTED, "rehearsal of a device that has failed")
    torch.cuda.jiterator._create_jit_fn(_KERNEL)(torch.ones(8, device=device))


def run_out_of_memory(device: torch.device) -> None:
    """Raises torch.OutOfMemoryError on a device, RuntimeError on the host."""
    torch.empty(_TOO_MUCH, dtype=torch.uint8, device=device)


FAULTS: Final[dict[str, Callable[[torch.device], None]]] = {
    "illegal_access": access_illegally,
    "out_of_memory": run_out_of_memory,
}
