"""Ranks whose scripts diverge get an error, instead of waiting for each other until a collective's
timeout, or again and again."""

from pathlib import Path

import pytest

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote

SCRIPT = Path(__file__).parent / "evaluates_alone.py"
LEAVES_OUT = Path(__file__).parent / "skips_optimizer_step.py"


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tensor"])
def test_collective_operation_on_one_rank_alone_ends_the_run_with_one_clear_error(
    zygote: Zygote, tmp_path: Path, strategy: str
) -> None:
    with cluster(
        zygote, tmp_path, min_workers=2, max_workers=2, script=SCRIPT, STRATEGY=strategy
    ) as running:
        running.start(0)
        running.start(1)
        for worker in (running.workers[0], running.workers[1]):
            assert worker.wait() == 1, worker.said()
            assert "rank 0 is in evaluate, rank 1 is in a step of loader 'loader'" in worker.said()


def test_an_operation_in_the_middle_of_a_step_is_refused_by_name(
    zygote: Zygote, tmp_path: Path
) -> None:
    """A fault during the operation could neither keep nor undo the step's gradients."""
    environment = {"STRATEGY": "zero3", "IN_STEP": "1"}
    with cluster(
        zygote, tmp_path, min_workers=2, max_workers=2, script=SCRIPT, **environment
    ) as running:
        running.start(0)
        running.start(1)
        for worker in (running.workers[0], running.workers[1]):
            assert worker.wait() == 1, worker.said()
        assert "evaluate was called inside a step; call it after optimizer.step()" in running.said()


@pytest.mark.parametrize(
    ("strategy", "mistake", "says"),
    [
        ("ddp", "step", "rank 0 commits the step (optimizer.step()"),
        pytest.param(
            "zero1", "step", "rank 0 commits the step (optimizer.step()", marks=pytest.mark.matrix
        ),
        pytest.param(
            "zero3", "step", "rank 0 commits the step (optimizer.step()", marks=pytest.mark.matrix
        ),
        ("tensor", "step", "rank 1 runs a forward pass of the model"),
        pytest.param("ddp", "second", "rank 1 ends the batch", marks=pytest.mark.matrix),
        ("zero3", "second", "rank 1 ends the batch"),
        pytest.param("tensor", "second", "rank 1 ends the batch", marks=pytest.mark.matrix),
    ],
)
def test_optimizer_step_omitted_on_one_rank_ends_the_run_within_seconds(
    zygote: Zygote, tmp_path: Path, strategy: str, mistake: str, says: str
) -> None:
    environment = {"STRATEGY": strategy, "MISTAKE": mistake}
    with cluster(
        zygote, tmp_path, min_workers=2, max_workers=2, script=LEAVES_OUT, **environment
    ) as running:
        running.start(0)
        running.start(1)
        for worker in (running.workers[0], running.workers[1]):
            assert worker.wait() == 1, worker.said()
            assert "ranks diverged in step 3" in worker.said()
            assert says in worker.said(), worker.said()
