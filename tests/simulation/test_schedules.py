"""A fixed sample of the schedules that `make chaos` runs: numbered ones, and tears of each
strategy's steps. `make test` runs a part of the sample, `make parity` the rest."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.simulation import oracle
from tests.simulation.exhaustive import partitions, tears
from tests.simulation.scenario import LOOPS, STRATEGIES, Scenario
from tests.simulation.seeds import scenario_of

_FIRST, _SEEDS, _MATRIX_SEEDS = 200, 8, 168
_AT_ONCE = 8
_TEARS = 8


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.matrix) if first >= _FIRST + _SEEDS else first
        for first in range(_FIRST, _FIRST + _SEEDS + _MATRIX_SEEDS, _AT_ONCE)
    ],
)
def test_numbered_schedules_end_as_the_run_without_faults(first: int) -> None:
    for seed in range(first, first + _AT_ONCE):
        _check(scenario_of(seed))


_TORN = [*((s, LOOPS[3 * i % len(LOOPS)]) for i, s in enumerate(STRATEGIES)), ("pipeline", "save")]
_LONG = {"hybrid", "zero3", "hsdp", "zero2"}
"""Strategies whose tears take long. Faster strategies in `make test` use the same engines."""


@pytest.mark.parametrize(
    ("strategy", "loop"),
    [pytest.param(*each, marks=pytest.mark.matrix) if each[0] in _LONG else each for each in _TORN],
)
def test_a_step_may_be_torn_anywhere(strategy: str, loop: str) -> None:
    every = list(tears(strategy, loop))
    for scenario in itertools.islice(every, 7, None, max(1, len(every) // _TEARS)):
        _check(scenario)


@pytest.mark.parametrize(
    ("strategy", "loop", "every"),
    [
        ("zero3", "flat", 83),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in (
                ("zero3", "micro-batches", 59),
                ("zero2", "micro-batches", 15),
                ("zero1", "scaler", 15),
                ("hsdp", "clip", 59),
                ("hybrid", "flat", 29),
                ("pipeline", "flat", 23),
            )
        ),
    ],
)
def test_a_step_on_devices_may_be_torn_anywhere(strategy: str, loop: str, every: int) -> None:
    """After a lost collective the device continues with garbage, and the host receives no error."""
    for scenario in itertools.islice(tears(strategy, loop), 3, None, every):
        _check(dataclasses.replace(scenario, devices=True))


@pytest.mark.parametrize(
    ("strategy", "loop"),
    [
        ("ddp", "evaluate"),
        ("zero2", "operations"),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in (
                ("local_sgd", "operations"),
                ("zero3", "save"),
                ("hsdp", "evaluate"),
                ("hybrid", "operations"),
                ("pipeline", "save"),
            )
        ),
    ],
)
def test_ranks_may_be_cut_off_from_others_anywhere(strategy: str, loop: str) -> None:
    """Partitions begin in a step, at an epoch's end and in each operation. A rank that returns
    after its peers have continued is replaced."""
    for scenario in itertools.islice(partitions(strategy, loop, every=1), 3, None, 47):
        _check(scenario)


def _check(scenario: Scenario) -> None:
    verdict = oracle.run(scenario)
    assert verdict.ok, f"\n{scenario}\n\n{verdict}"
