"""Series of torch's own calls with shoal.process_group() survive faults: all survivors have the
results of one complete series."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote

SCRIPT = Path(__file__).with_name("torch_talking.py")
STEPS = 12
OPERATIONS = ("all_reduce", "all_gather", "broadcast", "barrier", "sizes of objects", "objects")
"""The calls after each step, in this order: gathering objects gathers their sizes first."""
QUICK = {("all_gather", "in_operation"), ("broadcast", "after_operation")}


@pytest.mark.parametrize(
    ("operation", "place"),
    [
        pytest.param(
            number,
            place,
            id=f"{name}-{place}",
            marks=() if (name, place) in QUICK else pytest.mark.slow,
        )
        for number, name in enumerate(OPERATIONS, start=1)
        for place in ("in_operation", "after_operation")
    ],
)
def test_rank_killed_during_a_series_leaves_the_others_with_one_answer(
    zygote: Zygote, tmp_path: Path, operation: int, place: str
) -> None:
    """Rank 0, the root, is killed after the fifth step. With after_operation it has already
    received the result."""
    with cluster(zygote, tmp_path, script=SCRIPT) as running:
        running.start(0, SHOAL_FAILPOINTS=f"session.{place}@{4 * len(OPERATIONS) + operation}=kill")
        running.start(1)
        running.start(2)
        results = running.finish(1, 2)
    first, second = (result["told"] for result in results)
    assert first == second
    assert list(first) == [str(step) for step in range(1, STEPS + 1)]
    for step in range(1, STEPS + 1):
        mean, everyones, named, objects = first[str(step)]
        ranks = len(everyones)
        assert ranks in (2, 3) if step == 5 else ranks == (3 if step < 5 else 2)
        assert mean == named == step, "as without a fault"
        assert everyones == [[step, rank] for rank in range(ranks)]
        assert objects == [{"step": step, "rank": rank} for rank in range(ranks)]
    assert results[0]["refused"] == results[1]["refused"], "all ranks repeat what one repeats"
    assert {tuple(each) for each in results[0]["refused"]} <= {
        (5, "RANKS_CHANGED"),
        (6, "RANKS_CHANGED"),
    }


def test_joining_rank_takes_part_in_the_series_of_its_steps(zygote: Zygote, tmp_path: Path) -> None:
    with cluster(zygote, tmp_path, script=SCRIPT, min_workers=2, join_grace_ms=0) as running:
        running.start(0)
        running.start(1)
        with running.held():
            running.wait_steps(1)
            running.start(2)
            running.wait_ranked(2)
        first, second, joined = (result["told"] for result in running.finish(0, 1, 2))
    assert first == second
    assert list(first) == [str(step) for step in range(1, STEPS + 1)]
    for step, (mean, everyones, named, objects) in first.items():
        ranks = 3 if step in joined else 2
        assert mean == named == int(step)
        assert everyones == [[int(step), rank] for rank in range(ranks)]
        assert objects == [{"step": int(step), "rank": rank} for rank in range(ranks)]
    assert joined == {step: first[step] for step in joined}
    assert joined
