"""Schedules that failed once, one file each. The file's name is the sentence that must be true."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation import oracle
from tests.simulation.scenario import Torn, parse

_FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("file", _FILES, ids=[file.stem.replace("_", " ") for file in _FILES])
def test_scenario_ends_as_expected(file: Path) -> None:
    verdict = oracle.run(parse(file.read_text()))
    assert verdict.ok, f"\n{verdict.scenario}\n\n{verdict}"


@pytest.mark.parametrize(
    "file",
    [file for file in _FILES if file.stem.startswith("a_torn_step_that_carries_the_stop")],
    ids=lambda file: file.stem,
)
def test_torn_step_is_the_last_one_of_a_stopped_job(file: Path) -> None:
    world = oracle.run(parse(file.read_text())).world
    torn = next(fault for fault in parse(file.read_text()).faults if isinstance(fault, Torn))
    assert world.stopped_at is not None
    assert world.stopped_at < world.losses[0][1], "the stop comes before the tear"
    ends = [process.diary.ended_with for process in world.processes if not process.dead]
    assert [end and end["steps"] for end in ends] == [torn.step] * 2
    assert all(
        ("lost" not in dict(process.diary.statuses).values())
        for process in world.processes
        if not process.dead
    )
