"""Runs many schedules in a worker process and shrinks the first failure of each kind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Final

from tests.simulation import oracle
from tests.simulation.exhaustive import partitions, tears
from tests.simulation.scenario import Scenario
from tests.simulation.seeds import scenario_of
from tests.simulation.shrinking import shrink

_RUNS_A_COLLECTION: Final = 20

Work = tuple[str, int, int] | tuple[str, str, str]
"""Either ("seeds", first seed, count) or ("tears" or "partitions", strategy, loop)."""


def work_off(work: Work) -> tuple[Work, int, list[tuple[str, frozenset[str]]]]:
    """Runs the schedules of one piece of work.

    Returns the work, the number of schedules, and the text and kinds of each failure. The first
    failure of each kind is shrunk.
    """
    failures: list[tuple[str, frozenset[str]]] = []
    shrunk: set[frozenset[str]] = set()
    runs = 0
    for name, scenario in _scenarios(work):
        runs += 1
        verdict = oracle.run(scenario)
        if verdict.ok:
            del verdict
            if runs % _RUNS_A_COLLECTION == 1:
                _collect()
            continue
        text = f"{name}{scenario}\n{verdict}"
        if verdict.kinds not in shrunk:
            shrunk.add(verdict.kinds)
            smallest = shrink(
                scenario,
                lambda other, kinds=verdict.kinds: bool(kinds & oracle.run(other).kinds),
                most_runs=40,
            )
            text += f"\n  shrunk to\n{smallest}\n{oracle.run(smallest)}"
        failures.append((text, verdict.kinds))
    return work, runs, failures


def _collect() -> None:
    """Collects garbage. After the first schedule it freezes the existing objects: nine tenths of
    all objects belong to torch and need no further scan."""
    gc.collect()
    if gc.isenabled():
        gc.disable()
        gc.freeze()


def _scenarios(work: Work) -> Iterator[tuple[str, Scenario]]:
    kind, first, second = work
    if isinstance(first, int) and isinstance(second, int):
        for seed in range(first, first + second):
            yield f"seed {seed}:\n", scenario_of(seed)
    else:
        for scenario in (partitions if kind == "partitions" else tears)(str(first), str(second)):
            yield "", scenario
