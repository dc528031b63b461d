"""`python -m benchmarks [TABLE ...]`: measures, prints the tables and writes them as JSON and Markdown, with plots.

`python -m benchmarks --docs docs` measures nothing, and writes the documentation's figures from what was measured last.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.pages import write_pages
from benchmarks.registry import BENCHMARKS, Benchmark, Options
from benchmarks.report import Machine, show, write


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tables that were asked for; 1 if one of them could not be made at all."""
    options = _parse(arguments)
    console = Console()
    if options.list:
        for benchmark in BENCHMARKS:
            console.print(f"{benchmark.key:4} {benchmark.title}", markup=False, highlight=False)
        return 0
    if options.docs is not None:
        for changed in write_pages(options.output, options.docs, [benchmark.key for benchmark in BENCHMARKS]):
            console.print(str(changed), markup=False, highlight=False)
        return 0
    # Ended as by Ctrl-C: the processes that were started are ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    chosen = [b for b in BENCHMARKS if not options.tables or b.key in options.tables]
    options.output.mkdir(parents=True, exist_ok=True)
    console.print(f"on {Machine.here()}", markup=False, highlight=False)
    return max([_run(benchmark, options, console) for benchmark in chosen])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    keys = [benchmark.key for benchmark in BENCHMARKS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure Shoal side by side with its peers.")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"which to make: {', '.join(keys)}; all when none is named")
    parser.add_argument("--list", action="store_true", help="name the tables and end")
    parser.add_argument("--quick", action="store_true", help="few repetitions, rough figures")
    parser.add_argument("--output", type=Path, default=Path("out/bench"), help="where JSON, Markdown and plots go")
    parser.add_argument(
        "--docs",
        type=Path,
        metavar="DIR",
        help="write DIR/benchmarks/tables.md, plots and the tables of other pages from what --output holds, and end",
    )
    options = parser.parse_args(arguments)
    if unknown := [table for table in options.tables if table not in keys]:
        parser.error(f"no table named {', '.join(unknown)}; there are {', '.join(keys)}")
    return options


def _run(benchmark: Benchmark, options: argparse.Namespace, console: Console) -> int:
    command = " ".join(["python -m benchmarks", benchmark.key, *(["--quick"] if options.quick else [])])
    machine = Machine.here()
    started = time.monotonic()
    with console.status(f"{benchmark.key}: {benchmark.title}"):
        try:
            table = benchmark.measure(Options(quick=options.quick, output=options.output))
        except Exception:  # the other tables are still worth making
            console.print_exception()
            return 1
    write(options.output, table, machine, command)
    show(console, table)
    console.print(f"{time.monotonic() - started:.0f} s; written to {options.output / benchmark.key}.json and .md\n", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
