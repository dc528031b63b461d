"""The devices on which the benchmarks' workers compute: the host's cores; CUDA devices, one per
worker (`python -m benchmarks --device cuda`); or one CUDA device for all workers (`--device
cuda-shared`). Rates measured on a shared device say nothing about separate GPUs.

A rehearsal runs the CUDA version of the benchmarks (its systems and lower bounds) on the host, with
the host's sizes. It shows, without a GPU, whether the benchmarks work; its figures are meaningless.
This module measures nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from benchmarks.errors import MeasurementError
from benchmarks.report import Row
from benchmarks.workers.workload import SHARED

CPU: Final = "cpu"
CUDA: Final = "cuda"
REHEARSAL: Final = "cuda-rehearsal"
KINDS: Final = (CPU, CUDA, SHARED, REHEARSAL)
_ASK: Final = (
    "import json, torch; n = torch.cuda.device_count(); "
    "print(json.dumps([torch.cuda.get_device_name(i) for i in range(n)] if "
    "torch.cuda.is_available() else []))"
)
_ASK_TIMEOUT_S: Final = 120
_REHEARSED: Final = 4
"""Number of imaginary devices in a rehearsal."""
_SHARING: Final = 8
"""Number of workers that may share a device: as many as the largest row has."""
_ROUNDS: Final = 2

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of this machine that workers may use."""

    kind: str = CPU
    """One of `KINDS`."""
    names: tuple[str, ...] = ()
    """Names of the devices; empty on the host."""

    @property
    def for_cuda(self) -> bool:
        """True if the systems, lower bounds and targets for CUDA devices apply."""
        return self.kind != CPU

    @property
    def flag(self) -> str:
        """Value of the workers' flag for the device."""
        return self.kind if self.kind in (CUDA, SHARED) else CPU

    def size(self, host: T, device: T) -> T:
        """Returns `device` if each worker has its own CUDA device, otherwise `host`. The host's
        size also applies to workers that share a GPU, because they are connected by the loopback
        interface."""
        return device if self.kind == CUDA else host

    def rounds(self, wanted: int) -> int:
        """Returns the number of rounds to measure. In a rehearsal, it is just large enough to show
        that the benchmark works."""
        return _ROUNDS if self.kind == REHEARSAL else wanted

    def describe(self, host: str, devices: str) -> str:
        """Returns one of two texts: the one about the host or the one about CUDA devices."""
        return devices if self.for_cuda else host

    def named(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """Returns the rows with the name of the device added to their names, except for the
        host."""
        return tuple(
            replace(row, name=f"{row.name}, on {self.names[0]}")
            if self.for_cuda and self.names
            else row
            for row in rows
        )

    def __str__(self) -> str:
        return (
            f"{len(self.names)} x {self.names[0]}"
            if self.names
            else "no CUDA device"
            if self.for_cuda
            else "the host"
        )

    def lacking(self, what: str, workers: int) -> str | None:
        """Returns an error text if there are fewer devices than `what` has workers, otherwise
        None."""
        if not self.for_cuda or len(self.names) >= workers:
            return None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = f"torch sees {len(self.names)} here" + (
            "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        )
        return (
            f"{what} needs {workers} CUDA devices, one for each worker, and {seen}: run it on a "
            f"machine with as many and a CUDA build of torch; `--device {REHEARSAL}` shows on the "
            "host whether it works"
        )


HOST: Final = Devices()


def devices_of(kind: str) -> Devices:
    """Returns the devices of a kind. Raises MeasurementError if torch cannot be queried for CUDA
    devices."""
    if kind == CPU:
        return HOST
    if kind == REHEARSAL:
        return Devices(kind=kind, names=("the host as a rehearsal",) * _REHEARSED)
    # In a process of its own: the harness keeps no memory of a device.
    answer = subprocess.run(
        [sys.executable, "-c", _ASK],
        capture_output=True,
        text=True,
        timeout=_ASK_TIMEOUT_S,
        check=False,
    )
    if answer.returncode:
        raise MeasurementError(
            f"torch cannot name the CUDA devices: {answer.stderr.strip().splitlines()[-1]}"
        )
    names = tuple(json.loads(answer.stdout))
    if kind == SHARED:
        names = (f"one {names[0]} that the workers share",) * _SHARING if names else ()
    return Devices(kind=kind, names=names)
