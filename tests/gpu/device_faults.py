"""Faults of a device in the middle of a step, which a worker brings about itself: an illegal
access, and memory that runs out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from shoal_common.exit_status import PUT_OUT
from shoal_worker.backends.process_end import end_now
from torch import nn

_PASS: Final = 7
"""The forward pass in which the fault comes."""
_TOO_MUCH: Final = 1 << 50
"""Bytes that neither a host nor a device has."""
_KERNEL: Final = (
    "template <typename T> T dereference(T x) { return x + *reinterpret_cast<volatile T*>(8); }"
)


def arm(fault: str, block: nn.Module, marker: Path) -> None:
    """Has `fault`, a key of `FAULTS`, happen in a later forward pass of `block`.

    It happens once for all processes with the same `marker`, a file: a replacement goes on
    undisturbed.
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
    """Starts a kernel that reads address 8; the host meets the error later.

    On the host it ends the process with the status that Shoal gives a worker for such an error.
    """
    if device.type == "cpu":
        end_now(PUT_OUT, "rehearsal of a device that has failed")
    torch.cuda.jiterator._create_jit_fn(_KERNEL)(torch.ones(8, device=device))


def run_out_of_memory(device: torch.device) -> None:
    """Raises torch.OutOfMemoryError on a device, RuntimeError on the host."""
    torch.empty(_TOO_MUCH, dtype=torch.uint8, device=device)


FAULTS: Final[dict[str, Callable[[torch.device], None]]] = {
    "illegal_access": access_illegally,
    "out_of_memory": run_out_of_memory,
}
