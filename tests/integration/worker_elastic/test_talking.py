"""Values that ranks exchange survive faults: all survivors receive the same ones, and none receives
nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote

SCRIPT = Path(__file__).with_name("talking.py")
STEPS = 12
OPERATIONS = ("all_reduce", "gather", "broadcast", "barrier")
"""The calls after each step, in this order."""
QUICK = {("all_reduce", "in_operation"), ("broadcast", "after_operation")}


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
def test_rank_killed_during_a_collective_leaves_the_others_with_one_answer(
    zygote: Zygote, tmp_path: Path, operation: int, place: str
) -> None:
    """Rank 0, whose value is broadcast, is killed after the fifth step. With after_operation it has
    already received the answer."""
    with cluster(zygote, tmp_path, script=SCRIPT) as running:
        running.start(0, SHOAL_FAILPOINTS=f"session.{place}@{4 * len(OPERATIONS) + operation}=kill")
        running.start(1)
        running.start(2)
        first, second = (result["told"] for result in running.finish(1, 2))
    assert first == second
    assert list(first) == [str(step) for step in range(1, STEPS + 1)]
    for step in range(1, STEPS + 1):
        ranks, steps, everyones, named = first[str(step)]
        assert steps == [ranks * step], "of one step, with each rank's part once"
        assert [step_of for step_of, _ in everyones] == [step] * len(everyones)
        assert named.endswith(f" at {step}")
        if step != 5:
            assert ranks == len(everyones) == (3 if step < 5 else 2)
            assert named.startswith("rank 0")
