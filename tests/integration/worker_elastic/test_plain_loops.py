"""A loop over torch's own loader: all surviving ranks see the same outcome of a step that meets a
fault, so all of them drop its batch or none does."""

from pathlib import Path

import pytest

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote

SCRIPT = Path(__file__).parent / "plain_loop.py"
STEPS = 20


@pytest.mark.parametrize(
    ("missed", "killed", "strategy"),
    [
        pytest.param(
            "step.summed@5=lose",
            "session.after_commit@5=kill",
            "ddp",
            id="one survivor missed its end",
        ),
        pytest.param(
            "step.summed@5=lose", "step.summed@5=kill", "zero2", id="one survivor alone saw its end"
        ),
        pytest.param(
            "reduction.completed@5=lose",
            "reduction.completed@5=kill",
            "ddp",
            id="nobody saw its end",
        ),
    ],
)
def test_batch_of_a_step_hit_by_a_fault_is_dropped_by_all_ranks_or_by_none(
    zygote: Zygote, tmp_path: Path, missed: str, killed: str, strategy: str
) -> None:
    with cluster(zygote, tmp_path, script=SCRIPT, STRATEGY=strategy) as running:
        running.start(0, SHOAL_FAILPOINTS=missed)
        running.start(1, SHOAL_FAILPOINTS=killed)
        running.start(2)
        one, other = running.finish(0, 2)
        assert one == other
        assert one["committed"] == STEPS - len(one["dropped"])
        # A rank that had seen the end of the fifth step may already have been in the sixth, which
        # is then lost for all ranks.
        assert (
            one["dropped"] == [[0, 4]]
            if killed.startswith("reduction")
            else one["dropped"] in ([], [[0, 5]])
        )
