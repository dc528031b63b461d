"""Runs scenarios from the command line: one, a range of seeds, or every tear of a step. See
README.md.

    python -m tests.simulation --seed 17
    python -m tests.simulation --scenario tests/simulation/scenarios/some.txt
    python -m tests.simulation --seeds 10000 --first 0
    python -m tests.simulation --exhaustive
    python -m tests.simulation --partitions

Exits with status 1 if a run failed. Every failure is printed, and each process shrinks the first
failure of each kind that it finds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.simulation import oracle
from tests.simulation.campaign import Work, work_off
from tests.simulation.exhaustive import cells, parted_cells
from tests.simulation.scenario import ALL_LOOPS, ALL_STRATEGIES, Scenario, parse
from tests.simulation.seeds import scenario_of
from tests.simulation.shrinking import shrink

_AT_ONCE = 50
"""Number of seeds that a process runs before it reports their results."""
_PIECES_A_PROCESS, _CELLS_A_PROCESS = 20, 3
"""Pieces of work after which a process is replaced, because it retains about 4 MB per schedule. A
cell has up to 1300 schedules."""


def main() -> int:
    """Runs the command and returns its exit status."""
    options = _options()
    if options.scenario is not None:
        return _show(parse(Path(options.scenario).read_text()), options)
    if options.seed is not None:
        return _show(scenario_of(options.seed), options)
    began, wrong, runs = time.monotonic(), Counter[str](), 0
    pieces = _CELLS_A_PROCESS if options.exhaustive or options.partitions else _PIECES_A_PROCESS
    with multiprocessing.get_context("spawn").Pool(
        options.processes, maxtasksperchild=pieces
    ) as pool:
        for work, done, failures in pool.imap_unordered(work_off, _works(options)):
            runs += done
            print(
                f"{' '.join(map(str, work))}: {done} schedules, {len(failures)} wrong", flush=True
            )
            for text, kinds in failures:
                wrong.update(kinds)
                print(f"\n--- {' '.join(sorted(kinds))}\n{text}", flush=True)
    minutes = (time.monotonic() - began) / 60
    each = runs / minutes / options.processes
    print(
        f"\n{runs} schedules in {minutes:.1f} min, {each:.0f} a minute in each of "
        f"{options.processes} processes"
    )
    print(f"wrong: {sum(wrong.values()) and dict(wrong)}")
    return int(bool(wrong))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="show one numbered schedule")
    what.add_argument("--scenario", help="show the scenario in this file")
    what.add_argument("--seeds", type=int, help="run this many seeds")
    what.add_argument("--exhaustive", action="store_true", help="run every tear of a step")
    what.add_argument(
        "--partitions", action="store_true", help="run a partition at every point of some steps"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--strategies", default=",".join(ALL_STRATEGIES))
    parser.add_argument("--loops", default=",".join(ALL_LOOPS))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--shrink",
        action="store_true",
        help="with --seed or --scenario: print the smallest scenario that fails in the same way",
    )
    return parser.parse_args()


def _works(options: argparse.Namespace) -> Iterable[Work]:
    if options.exhaustive or options.partitions:
        strategies, loops = options.strategies.split(","), options.loops.split(",")
        kind, all_cells = (
            ("tears", cells()) if options.exhaustive else ("partitions", parted_cells())
        )
        return [
            (kind, strategy, loop)
            for strategy, loop in all_cells
            if strategy in strategies and loop in loops
        ]
    end = options.first + options.seeds
    return [
        ("seeds", first, min(_AT_ONCE, end - first))
        for first in range(options.first, end, _AT_ONCE)
    ]


def _show(scenario: Scenario, options: argparse.Namespace) -> int:
    verdict = oracle.run(scenario, keeps_trails=True)
    world = verdict.world
    print(scenario, *world.notes, *world.tracebacks, sep="\n")
    for process in world.processes:
        print(
            f"{process.name}: exit {process.exit_code}, {process.points} points, outcomes "
            f"{process.diary.statuses}"
        )
    print(verdict)
    if options.shrink and not verdict.ok:
        print(
            "\nshrunk to",
            shrink(scenario, lambda other: bool(verdict.kinds & oracle.run(other).kinds)),
            sep="\n",
        )
    return int(not verdict.ok)


if __name__ == "__main__":
    sys.exit(main())
