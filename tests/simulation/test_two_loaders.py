"""Joiners whose script has another loop before the one that their peers have reached. The
simulator's standard loops have one loader."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import shoal

from tests.simulation import loops, oracle
from tests.simulation.processes import Process
from tests.simulation.scenario import parse


@pytest.fixture(autouse=True)
def loop_before_the_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes scripts take two steps with a first loader before the scenario's steps, also in runs
    without faults."""
    oracle.reference.cache_clear()
    train = loops.Training._run_dealt

    def train_twice(training: loops.Training) -> None:
        first = shoal.ElasticDataLoader(
            training.samples, global_batch_size=30, seed=5, name="first"
        )
        for _ in first.epochs(1):
            for batch in first:
                training._pass(*batch)
                training._step()
        train(training)

    monkeypatch.setattr(loops.Training, "_run_dealt", train_twice)
    yield
    oracle.reference.cache_clear()


def run(*lines: str) -> dict[str, Process]:
    """Runs a scenario without violations and returns the processes by name."""
    verdict = oracle.run(parse("\n".join(lines)))
    assert verdict.ok, f"\n{verdict.scenario}\n\n{verdict}"
    return {process.name: process for process in verdict.world.processes}


@pytest.mark.parametrize(
    "more", [[], ["a dies at point 205"]], ids=["its donor lives", "its donor dies"]
)
def test_a_joiner_that_waits_for_more_ranks_is_where_its_peers_are(more: list[str]) -> None:
    scenario = "pipeline, loop save, 3 ranks, replaced, schedule 0"
    processes = run(
        scenario, "collective -1 of step 7: b dies, nobody got it", "c dies at point 178", *more
    )
    alive = [process for process in processes.values() if not process.dead]
    assert [process.exit_code for process in alive] == [0] * len(alive), [
        process.failure for process in alive
    ]
    ends = [process.diary.ended_with for process in alive]
    assert all(end is not None for end in ends)
    assert len({end["steps"] for end in ends if end is not None}) == 1
