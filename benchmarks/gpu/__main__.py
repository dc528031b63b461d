"""`python -m benchmarks.gpu`: measures one CUDA device, prints the tables and writes them as JSON and Markdown. Skips, and says why, where
there is none.

`--device cpu` takes the steps on the host: a rehearsal of the program, whose figures say nothing of any device.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from shoal_worker.backends.nccl.device import CudaDevice

from benchmarks.gpu import groups
from benchmarks.gpu.steps import Taken, take, ways
from benchmarks.report import Machine, Row, Table, show, write

_NO_TARGET = "none: figures of a device, to be looked at"
_COMMAND = "make bench-gpu"
_COLUMNS = ("step ms", "slowest ms", "launches", "waits", "to host, pinned", "to host, pageable", "operators", "peak MiB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what can run here."""
    options = _parse(arguments)
    console = Console()
    if options.device == "cuda" and (missing := _missing()):
        console.print(f"skipped: {missing}", markup=False, highlight=False)
        return 0
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else "the host, as a rehearsal"
    machine = Machine.here()
    console.print(f"{what}, on {machine}", markup=False, highlight=False)
    tables = [_steps(device, options.width, options.steps, what)]
    if device.type == "cuda":
        tables += [_copies(device, what), _groups(what)]
    for table in tables:
        show(console, table)
        write(options.output, table, machine, _COMMAND)
    return 0


def _missing() -> str:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device here (a build for CUDA, its driver, CUDA_VISIBLE_DEVICES)"
    return "" if dist.is_nccl_available() else "this torch is built without NCCL"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Measure one CUDA device.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, whose figures say nothing")
    parser.add_argument("--width", type=int, default=1024, help="of the model's layers")
    parser.add_argument("--steps", type=int, default=50, help="that are timed in each way")
    parser.add_argument("--output", type=Path, default=Path("out/bench-gpu"), help="where JSON and Markdown go")
    return parser.parse_args(arguments)


def _steps(device: torch.device, width: int, steps: int, what: str) -> Table:
    rows = []
    for way in ways(compiled=device.type == "cuda" and shutil.which("cc") is not None):
        try:
            rows.append(_row(take(way, device=device, width=width, steps=steps)))
        except Exception as error:  # of one way: the others are measured all the same
            rows.append(Row(name=way.name, command=_COMMAND, cells={}, failure=f"{type(error).__name__}: {error}"))
    return Table(
        key="gpu-steps",
        title=f"Steps on {what}",
        target=_NO_TARGET,
        method=(
            f"A decoder of width {width}, 16 samples a step, AdamW, one process. Each step is timed to where the device is at rest. What "
            "the host tells the device is counted by torch's profiler over further steps. Shoal is alone: no rank is waited for."
        ),
        columns=_COLUMNS,
        rows=tuple(rows),
        verdict="What Shoal adds is the difference to the row of torch.",
    )


def _row(taken: Taken) -> Row:
    counts = taken.counts
    return Row(
        name=taken.way.name,
        command=_COMMAND,
        cells={
            "step ms": f"{1e3 * statistics.median(taken.seconds):.2f}",
            "slowest ms": f"{1e3 * max(taken.seconds):.2f}",
            "launches": f"{counts.launches:.1f}",
            "waits": f"{counts.waits:.1f}",
            "to host, pinned": f"{counts.to_host.get('Pinned', 0.0):.1f}",
            "to host, pageable": f"{counts.to_host.get('Pageable', 0.0):.1f}",
            "operators": f"{counts.operators:.1f}",
            "peak MiB": f"{taken.peak_bytes / 2**20:.1f}",
        },
        samples={"step_s": taken.seconds},
    )


def _copies(device: torch.device, what: str) -> Table:
    rows = [
        Row(
            name=f"{each.mib} MiB, {'pinned' if each.pinned else 'pageable'}",
            command=_COMMAND,
            cells={"GB/s": f"{statistics.median(each.bytes_per_s) / 1e9:.2f}"},
            samples={"bytes_per_s": each.bytes_per_s},
        )
        for each in groups.copies(device)
    ]
    return Table(
        key="gpu-copies",
        title=f"Copies to the host from {what}",
        target=_NO_TARGET,
        method="Each copy is waited for; the median of ten.",
        columns=("GB/s",),
        rows=tuple(rows),
        verdict="",
    )


def _medians(name: str, ones: groups.GroupsOfOne, of: str) -> Row:
    """A row with the median of one of its lists of seconds, and the memory that its groups have lost."""
    seconds: tuple[float, ...] = getattr(ones, of)
    cells = {"ms": f"{1e3 * statistics.median(seconds):.1f}", "memory lost, MiB": f"{ones.lost_bytes / 2**20:.1f}"}
    return Row(name=name, command=_COMMAND, cells=cells, samples={of: seconds})


def _groups(what: str) -> Table:
    ones, many = groups.come_and_go(CudaDevice), groups.collectives(CudaDevice)
    finalized, parts = groups.come_and_go(CudaDevice, finalize=True), groups.come_and_go(CudaDevice, split=True)
    count = groups.COLLECTIVES
    rows = (
        _medians(f"a group of one connects, {groups.GROUPS} times", ones, "connect_s"),
        _medians("and is left", ones, "leave_s"),
        _medians("and is finalized", finalized, "leave_s"),
        _medians("it is split off another, and does not connect", parts, "connect_s"),
        Row(name=f"{count} all-reduces of 4 MiB, each waited for", command=_COMMAND, cells={"ms": f"{1e3 * many.waited_for_s:.2f}"}),
        Row(name=f"{count} all-reduces of 4 MiB, waited for once", command=_COMMAND, cells={"ms": f"{1e3 * many.ordered_s:.2f}"}),
        Row(name="until the host begins to wait", command=_COMMAND, cells={"ms": f"{1e3 * many.started_s:.2f}"}),
    )
    return Table(
        key="gpu-groups",
        title=f"Groups of one rank over NCCL on {what}",
        target=_NO_TARGET,
        method="Connecting includes the Gloo group beside NCCL's, and a first all-reduce.",
        columns=("ms", "memory lost, MiB"),
        rows=rows,
        verdict="",
    )


if __name__ == "__main__":
    sys.exit(main())
