"""Pipelines of real processes on Gloo: the same results, and an end to all waits when a rank fails or dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shoal_common.processes import tied_to_parent
from shoal_worker.pipelining.schedule import schedule_names

Run = Callable[..., dict[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """run(case, pipeline, data, **arguments): what each rank said; those that died said nothing."""
    command = tied_to_parent([sys.executable, "-m", "tests.integration.pipelining.ranks"])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parents[3]
    ) as nursery:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        lines_in, lines_out = nursery.stdin, nursery.stdout
        assert lines_out.readline() == "ready\n"

        def run(case: str, pipeline: int, data: int = 1, **arguments: Any) -> dict[int, dict[str, Any]]:
            print(json.dumps({"case": case, "pipeline": pipeline, "data": data, "arguments": arguments}), file=lines_in, flush=True)
            said = {int(rank): one for rank, one in json.loads(lines_out.readline()).items()}
            errors = [f"rank {rank}: {one['error']}" for rank, one in said.items() if "error" in one]
            assert not errors, "\n".join(errors)
            return {rank: one["result"] for rank, one in said.items()}

        yield run
        lines_in.close()


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.matrix), 4])
@pytest.mark.parametrize("schedule", schedule_names())
def test_every_schedule_gives_the_gradients_of_one_process_over_gloo(run: Run, schedule: str, ranks: int) -> None:
    results = run("train", ranks, model="gpt", schedule=schedule)
    assert len(results) == ranks
    for one in results.values():
        assert one["gradients"] < 1e-10
        assert one["output"] < 1e-10
        assert one["loss"] == pytest.approx(one["expected_loss"], abs=1e-10)


@pytest.mark.parametrize(("model", "schedule"), [("gpt", "zbv"), ("mlp", "zero_bubble"), ("cnn", "1f1b")])
def test_replicas_of_pipelines_over_gloo(run: Run, model: str, schedule: str) -> None:
    results = run("train", 2, 2, model=model, schedule=schedule)
    assert len(results) == 4
    assert all(one["gradients"] < 1e-10 for one in results.values())
    assert len({round(one["norm"], 10) for one in results.values()}) == 1


@pytest.mark.parametrize("how", ["raises", "dies"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_no_rank_waits_for_one_that_fails_or_dies(run: Run, schedule: str, how: str) -> None:
    results = run("break_down", 4, schedule=schedule, how=how)
    expected = dict.fromkeys(range(4), "GroupEndedError") | {1: "ArithmeticError"}
    if how == "dies":
        del expected[1]
    assert {rank: one["error"] for rank, one in results.items()} == expected
    assert all(one["seconds"] < 5 for one in results.values()), results  # the groups' timeout is 20 s
