"""Shrinks a failing scenario to the smallest one found that fails in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tests.simulation.scenario import ALL_LOOPS, Scenario, Torn


def shrink(
    scenario: Scenario, fails: Callable[[Scenario], bool], *, most_runs: int = 150
) -> Scenario:
    """Returns the smallest scenario found for which `fails` is true, as it is for `scenario`.

    most_runs: maximum number of calls to `fails`.
    """
    runs = 0
    found = True
    while found and runs < most_runs:
        found = False
        for smaller in _smaller(scenario):
            runs += 1
            if fails(smaller):
                scenario, found = smaller, True
                break
            if runs >= most_runs:
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yields scenarios that are simpler in one respect, the most informative first."""
    replace = dataclasses.replace
    faults = scenario.faults
    for index in range(len(faults)):
        yield replace(scenario, faults=faults[:index] + faults[index + 1 :])
    if scenario.replaced:
        yield replace(scenario, replaced=False)
    if scenario.devices:
        yield replace(scenario, devices=False)
    if scenario.ranks > 2:
        yield replace(scenario, ranks=scenario.ranks - 1)
    for loop in ALL_LOOPS[: ALL_LOOPS.index(scenario.loop)][:1]:
        yield replace(scenario, loop=loop)
    if scenario.strategy not in ("ddp", "zero3"):
        yield from (replace(scenario, strategy=strategy) for strategy in ("ddp", "zero3"))
    if scenario.schedule:
        yield replace(scenario, schedule=0)
    for index, fault in enumerate(faults):
        if isinstance(fault, Torn) and fault.got and fault.dies is None:
            yield replace(
                scenario,
                faults=(*faults[:index], replace(fault, got=fault.got[:1]), *faults[index + 1 :]),
            )
