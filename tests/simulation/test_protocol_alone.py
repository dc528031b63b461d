"""examples/how_a_step_survives.py, the commit protocol alone, gives the same answers as the
product."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.simulation import oracle
from tests.simulation.exhaustive import tears
from tests.simulation.scenario import Scenario, Torn

ALONE: dict[str, Any] = runpy.run_path(
    str(Path(__file__).parents[2] / "examples" / "how_a_step_survives.py")
)
STEP, STEPS = 3, 6
"""The torn step, and the number of steps of the run."""
PHASES = ("reduce", "commit")
"""The collectives of a step of ddp."""


def torn_steps() -> list[Scenario]:
    """Returns every way to tear the step's collectives among three ranks."""
    firsts = oracle.reference(Scenario(strategy="ddp", loop="flat", steps=3, ranks=3))
    begin, end = firsts.first_collectives[STEP - 1], firsts.first_collectives[STEP]
    assert end - begin == len(PHASES)
    return list(tears("ddp", "flat", collectives=range(begin, end)))


def answers_alone(torn: Torn, phase: str) -> dict[str, list[tuple[int, str]]]:
    """Returns each worker's answers in the example under the same fault."""
    fault = ALONE["Fault"](STEP, phase, torn.dies, torn.entered, torn.got)
    workers = ALONE["train"]("abc", STEPS, [fault])
    weights = {worker.state for name, worker in workers.items() if name != torn.dies}
    assert weights == {ALONE["train"]("a", STEPS)["a"].state}
    return {name: worker.answers for name, worker in workers.items()}


@pytest.mark.timeout(300)
def test_protocol_alone_answers_like_the_product_however_a_step_is_torn() -> None:
    scenarios = torn_steps()
    first = min(
        fault.collective
        for scenario in scenarios
        for fault in scenario.faults
        if isinstance(fault, Torn)
    )
    # of every three ways one: each of the kinds comes up, for both collectives
    for scenario in itertools.islice(scenarios, 0, None, 3):
        torn = scenario.faults[0]
        assert isinstance(torn, Torn)
        world = oracle.run(scenario).world
        product = {process.name: process.diary.statuses for process in world.processes}
        assert answers_alone(torn, PHASES[torn.collective - first]) == product, str(scenario)


def test_new_worker_receives_the_state_at_a_step_boundary() -> None:
    workers = ALONE["train"]("ab", STEPS, joiner=("c", 2))
    assert len({worker.state for worker in workers.values()}) == 1
    assert [step for step, _ in workers["c"].answers] == [4, 5, 6]
