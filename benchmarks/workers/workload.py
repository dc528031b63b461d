"""The task of a worker, and the command line that describes it. The module does not import torch,
because the harness imports it too."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SHARED: Final = "cuda-shared"
DEVICES: Final = ("cpu", "cuda", SHARED)
"""Values of `Workload.device`."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training loop, the same for all systems."""

    log: Path
    """Directory of the step logs."""
    ranks: int
    """Number of workers at the start."""
    width: int
    """Width of the model's layers."""
    batch: int
    """Samples per rank per step."""
    steps: int = 0
    """Number of steps after which the worker exits; 0: it exits when the harness tells it to."""
    device: str = "cpu"
    """Device of the workers: "cpu"; "cuda", each worker on its own device; "cuda-shared", all on
    one device."""
    gate: Path | None = None
    """Socket on which the harness decides when the worker runs and how many steps; None: the worker
    runs without pauses."""

    def arguments(self) -> list[str]:
        """Returns the command-line arguments from which `workload_of` restores this workload."""
        words = [
            f"--step-logs={self.log}",
            f"--ranks={self.ranks}",
            f"--width={self.width}",
            f"--batch={self.batch}",
            f"--steps={self.steps}",
            f"--device={self.device}",
        ]
        return words if self.gate is None else [*words, f"--gate={self.gate}"]

    @property
    def global_batch(self) -> int:
        """Samples per step, over all ranks."""
        return self.batch * self.ranks


def parser() -> argparse.ArgumentParser:
    """Returns a parser for the flags that all worker programs have."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--step-logs", dest="log", type=Path, required=True)
    flags.add_argument("--gate", type=Path)
    flags.add_argument("--device", choices=DEVICES, default="cpu")
    for name in ("ranks", "width", "batch", "steps"):
        flags.add_argument(f"--{name}", type=int, required=True)
    return flags


def workload_of(options: argparse.Namespace) -> Workload:
    """Returns the workload that the flags describe."""
    return Workload(
        log=options.log,
        ranks=options.ranks,
        width=options.width,
        batch=options.batch,
        steps=options.steps,
        device=options.device,
        gate=options.gate,
    )
