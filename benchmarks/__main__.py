"""Runs benchmarks, prints the tables and writes them as JSON and Markdown, with plots:
`python -m benchmarks [TABLE ...]`.

With `--device cuda`, it measures the tables that support CUDA devices, with one device per worker,
and writes them to a separate directory.

`python -m benchmarks --docs docs` measures nothing; it writes the documentation's figures from the
last measurements.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.devices import CPU, KINDS, SHARED, Devices, devices_of
from benchmarks.errors import MeasurementError
from benchmarks.pages import write_pages
from benchmarks.registry import BENCHMARKS, Benchmark, Options
from benchmarks.report import Machine, show, write
from benchmarks.workers.shared_gpu import first_visible


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the requested tables and returns the exit status: 1 if one of them could not be
    measured at all, 2 if a request is invalid on this machine."""
    options = _parse(arguments)
    console = Console()
    if options.list:
        for benchmark in BENCHMARKS:
            console.print(f"{benchmark.key:4} {benchmark.title}", markup=False, highlight=False)
        return 0
    if options.docs is not None:
        for changed in write_pages(
            options.output, options.docs, [benchmark.key for benchmark in BENCHMARKS]
        ):
            console.print(str(changed), markup=False, highlight=False)
        return 0
    try:
        devices = devices_of(options.device)
    except MeasurementError as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2
    chosen = [
        b
        for b in BENCHMARKS
        if b.key in options.tables
        or (not options.tables and (b.on_devices or not devices.for_cuda))
    ]
    if refusal := _refusal(chosen, devices):
        print(f"python -m benchmarks: {refusal}", file=sys.stderr)
        return 2
    if not devices.for_cuda:
        # workers compute on the host also where there are devices
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif devices.kind == SHARED:
        os.environ["CUDA_VISIBLE_DEVICES"] = first_visible()
    # Ended as by Ctrl-C: the processes that were started are ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options.output.mkdir(parents=True, exist_ok=True)
    console.print(
        f"on {Machine.here()}{f', {devices}' if devices.for_cuda else ''}",
        markup=False,
        highlight=False,
    )
    return max([_run(benchmark, options, devices, console) for benchmark in chosen])


def _refusal(chosen: Sequence[Benchmark], devices: Devices) -> str | None:
    """Returns an error text if one of the chosen tables cannot be measured on these devices;
    otherwise None."""
    if not devices.for_cuda:
        return None
    there_are = ", ".join(b.key for b in BENCHMARKS if b.on_devices)
    for benchmark in chosen:
        if benchmark.on_devices is None:
            return (
                f"--device {devices.kind}: {benchmark.key} is measured on the host alone; "
                f"expected some of {there_are}"
            )
        if (
            lacking := devices.lacking(
                f"--device {devices.kind}: {benchmark.key}", benchmark.on_devices
            )
        ) is not None:
            return lacking
    return None


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    keys = [benchmark.key for benchmark in BENCHMARKS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure Shoal side by side with its peers."
    )
    parser.add_argument(
        "tables",
        nargs="*",
        metavar="TABLE",
        help=f"which to make: {', '.join(keys)}; all when none is named",
    )
    parser.add_argument("--list", action="store_true", help="name the tables and end")
    parser.add_argument("--quick", action="store_true", help="few repetitions, rough figures")
    parser.add_argument(
        "--device",
        choices=KINDS,
        default=CPU,
        help="for workers; cuda-shared: all on one GPU; cuda-rehearsal: as cuda, on the host",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="where JSON, Markdown and plots go: out/bench, or out/bench-cuda for devices",
    )
    parser.add_argument(
        "--docs",
        type=Path,
        metavar="DIR",
        help="write DIR/benchmarks/tables.md, plots and the tables of other pages from what "
        "--output holds, and end",
    )
    options = parser.parse_args(arguments)
    options.output = options.output or Path(
        "out/bench" if options.device == CPU else f"out/bench-{options.device}"
    )
    if unknown := [table for table in options.tables if table not in keys]:
        parser.error(f"no table named {', '.join(unknown)}; there are {', '.join(keys)}")
    return options


def _run(
    benchmark: Benchmark, options: argparse.Namespace, devices: Devices, console: Console
) -> int:
    flags = [
        *([f"--device {devices.kind}"] if devices.for_cuda else []),
        *(["--quick"] if options.quick else []),
    ]
    command = " ".join(["python -m benchmarks", benchmark.key, *flags])
    machine = Machine.here()
    started = time.monotonic()
    with console.status(f"{benchmark.key}: {benchmark.title}"):
        try:
            table = benchmark.measure(
                Options(quick=options.quick, output=options.output, devices=devices)
            )
        except Exception:  # the other tables are still worth making
            console.print_exception()
            return 1
    write(options.output, table, machine, command)
    show(console, table)
    console.print(
        f"{time.monotonic() - started:.0f} s; written to {options.output / benchmark.key}.json and "
        ".md\n",
        markup=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
