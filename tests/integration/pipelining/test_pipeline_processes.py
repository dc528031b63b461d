"""Pipelines of real processes over Gloo have the same results, and all waits end if a rank raises
or dies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from shoal_worker.pipelining.schedule import schedule_names

from tests.ranks.processes import Rank, run_task

Run = Callable[..., dict[int, dict[str, Any]]]


@pytest.fixture
def run(take_ranks: Callable[[int], list[Rank]], tmp_path: Path) -> Run:
    """Returns run(case, ranks, dying=(), **arguments), which returns the report of each rank except
    the dying ones."""

    def run(
        case: str, ranks: int, dying: Collection[int] = (), **arguments: Any
    ) -> dict[int, dict[str, Any]]:
        task = "tests.integration.pipelining.ranks:run_case"
        return run_task(
            take_ranks(ranks),
            task,
            dying=dying,
            directory=str(tmp_path),
            case=case,
            size=ranks,
            arguments=arguments,
        )

    return run


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.matrix), 4])
@pytest.mark.parametrize("schedule", schedule_names())
def test_every_schedule_gives_the_gradients_of_one_process_over_gloo(
    run: Run, schedule: str, ranks: int
) -> None:
    results = run("train", ranks, model="gpt", schedule=schedule)
    assert len(results) == ranks
    for one in results.values():
        assert one["gradients"] < 1e-10
        assert one["output"] < 1e-10
        assert one["loss"] == pytest.approx(one["expected_loss"], abs=1e-10)


@pytest.mark.parametrize("how", ["raises", "dies"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_no_rank_waits_for_a_failed_or_dead_one(run: Run, schedule: str, how: str) -> None:
    results = run("break_down", 4, dying=[1] if how == "dies" else [], schedule=schedule, how=how)
    expected = dict.fromkeys(results, "GroupEndedError") | (
        {1: "ArithmeticError"} if how == "raises" else {}
    )
    assert {rank: one["error"] for rank, one in results.items()} == expected
    # the groups' timeout is 120 s
    assert all(one["seconds"] < 50 for one in results.values()), results
