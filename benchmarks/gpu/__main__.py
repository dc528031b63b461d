"""Runs benchmarks on one CUDA device, prints the tables and writes them as JSON and Markdown:
`python -m benchmarks.gpu [PART ...]`. If there is no device, prints the reason and measures
nothing.

`--device cpu` is a rehearsal on the host with tiny sizes. It shows that a part works, but its
figures say nothing about any device. Parts that need a device (copies, groups) are then omitted.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from rich.console import Console
from shoal_worker.backends.nccl.device import CudaDevice

from benchmarks.gpu import checkpoint, coordinator, groups, large, pair, recovery
from benchmarks.gpu.context import NO_TARGET, Context
from benchmarks.gpu.steps import Taken, Way, take, ways
from benchmarks.report import Machine, Row, Table, show, write

_COMMAND = "make bench-gpu"
_COLUMNS = (
    "step ms",
    "slowest ms",
    "launches",
    "waits",
    "to host, pinned",
    "to host, pageable",
    "operators",
    "peak MiB",
)
_ON_DEVICES_ALONE: Final = ("copies", "groups")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the parts that can be measured here. Returns 1 if nothing was measured for one of
    them."""
    options = _parse(arguments)
    console = Console()
    if options.device == "cuda" and (missing := _missing()):
        console.print(f"skipped: {missing}", markup=False, highlight=False)
        return 0
    # Ended as by Ctrl-C: the processes that were started are ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    context = _context(options)
    if context.rehearsal:
        torch.set_num_threads(1)
    machine = Machine.here()
    console.print(f"{context.what}, on {machine}", markup=False, highlight=False)
    nothing = False
    for part in options.parts or PARTS:
        if context.rehearsal and part in _ON_DEVICES_ALONE:
            console.print(
                f"left out: {part} is measured on a device alone", markup=False, highlight=False
            )
            continue
        table = PARTS[part](context)
        show(console, table)
        write(options.output, table, machine, _COMMAND)
        nothing = nothing or all(row.failure for row in table.rows)
    return int(nothing)


def _context(options: argparse.Namespace) -> Context:
    on_device = options.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")
    what = torch.cuda.get_device_name(device) if on_device else "the host, as a rehearsal"
    return Context(
        device=device, what=what, width=options.width, steps=options.steps, rows=options.rows
    )


def _missing() -> str:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device here (a build for CUDA, its driver, CUDA_VISIBLE_DEVICES)"
    return "" if dist.is_nccl_available() else "this torch is built without NCCL"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Measure one CUDA device."
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: a rehearsal, whose figures say nothing",
    )
    parser.add_argument("--width", type=int, default=1024, help="of the small model's layers")
    parser.add_argument(
        "--steps", type=int, default=50, help="of the small model that are timed in each way"
    )
    parser.add_argument(
        "--rows",
        type=Path,
        help="append each row to this file, as a line of JSON, once it was measured",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("out/bench-gpu"), help="where JSON and Markdown go"
    )
    options = parser.parse_args(arguments)
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"no part named {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return options


def _steps(context: Context) -> Table:
    chosen = ways(compiled=context.device.type == "cuda" and shutil.which("cc") is not None)
    rows = [
        context.measured("steps", way.name, functools.partial(_way, context, way)) for way in chosen
    ]
    return Table(
        key="gpu-steps",
        title=f"Steps on {context.what}",
        target=NO_TARGET,
        method=(
            f"A decoder of width {context.width}, 16 samples a step, AdamW, one process. Each step "
            "ends when the device is at rest. What the host tells the device is counted by "
            "torch's profiler over further steps. Shoal is alone: no rank is waited for."
        ),
        columns=_COLUMNS,
        rows=tuple(rows),
        verdict="What Shoal adds is the difference to the row of torch.",
    )


def _way(context: Context, way: Way) -> Row:
    return _row(take(way, device=context.device, width=context.width, steps=context.steps))


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


def _copies(context: Context) -> Table:
    rows = [
        Row(
            name=f"{each.mib} MiB, {'pinned' if each.pinned else 'pageable'}",
            command=_COMMAND,
            cells={"GB/s": f"{statistics.median(each.bytes_per_s) / 1e9:.2f}"},
            samples={"bytes_per_s": each.bytes_per_s},
        )
        for each in groups.copies(context.device)
    ]
    rows = [context.measured("copies", row.name, lambda row=row: row) for row in rows]
    return Table(
        key="gpu-copies",
        title=f"Copies to the host from {context.what}",
        target=NO_TARGET,
        method="Each copy is waited for; the median of ten.",
        columns=("GB/s",),
        rows=tuple(rows),
        verdict="",
    )


def _medians(name: str, ones: groups.GroupsOfOne, of: str) -> Row:
    """Returns a row with the median of a list of durations, and the device memory that was not
    freed. `of`: name of the list, an attribute of `ones`."""
    seconds: tuple[float, ...] = getattr(ones, of)
    cells = {
        "ms": f"{1e3 * statistics.median(seconds):.1f}",
        "memory lost, MiB": f"{ones.lost_bytes / 2**20:.1f}",
    }
    return Row(name=name, command=_COMMAND, cells=cells, samples={of: seconds})


def _groups(context: Context) -> Table:
    ones, many = groups.come_and_go(CudaDevice), groups.collectives(CudaDevice)
    finalized, parts = (
        groups.come_and_go(CudaDevice, finalize=True),
        groups.come_and_go(CudaDevice, split=True),
    )
    count = groups.COLLECTIVES
    rows = (
        _medians(f"a group of one connects, {groups.GROUPS} times", ones, "connect_s"),
        _medians("and is left", ones, "leave_s"),
        _medians("and is finalized", finalized, "leave_s"),
        _medians("it is split off another, and does not connect", parts, "connect_s"),
        Row(
            name=f"{count} all-reduces of 4 MiB, each waited for",
            command=_COMMAND,
            cells={"ms": f"{1e3 * many.waited_for_s:.2f}"},
        ),
        Row(
            name=f"{count} all-reduces of 4 MiB, waited for once",
            command=_COMMAND,
            cells={"ms": f"{1e3 * many.ordered_s:.2f}"},
        ),
        Row(
            name="until the host begins to wait",
            command=_COMMAND,
            cells={"ms": f"{1e3 * many.started_s:.2f}"},
        ),
    )
    rows = tuple(context.measured("groups", row.name, lambda row=row: row) for row in rows)
    return Table(
        key="gpu-groups",
        title=f"Groups of one rank over NCCL on {context.what}",
        target=NO_TARGET,
        method="Connecting includes the Gloo group beside NCCL's, and a first all-reduce.",
        columns=("ms", "memory lost, MiB"),
        rows=rows,
        verdict="",
    )


PARTS: Final[Mapping[str, Callable[[Context], Table]]] = {
    "pair": pair.measure,
    "large": large.measure,
    "recovery": recovery.measure,
    "coordinator": coordinator.measure,
    "checkpoint": checkpoint.measure,
    "steps": _steps,
    "copies": _copies,
    "groups": _groups,
}
"""Parts by name, the most valuable first."""


if __name__ == "__main__":
    sys.exit(main())
