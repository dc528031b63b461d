"""A run's best checkpoint survives the deaths of the ranks that wrote it, and the arrival of
joiners."""

import signal
from pathlib import Path

import pytest
import shoal

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote, eventually


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.matrix), "zero2"])
def test_death_and_joiner_do_not_replace_the_best_checkpoint_with_a_worse_one(
    zygote: Zygote, tmp_path: Path, strategy: str
) -> None:
    """Step 10 is the best. The worker that saved it is killed after that step, and another one
    replaces it."""
    checkpoints = tmp_path / "checkpoints"
    with cluster(
        zygote, tmp_path, EPOCHS="4", STRATEGY=strategy, CHECKPOINTS=str(checkpoints), BEST="1"
    ) as running:
        with running.held():
            for index in range(3):
                running.start(index)
            eventually((checkpoints / "step-10").is_dir, "the best checkpoint")
            first = next(member for member in running.job().members if member.rank == 0)
            index = next(i for i, name in running.members.items() if name == first.member_id)
            running.signal(index, signal.SIGKILL)
            running.start(3)
            running.wait_ranked(3)
        running.finish(*({0, 1, 2, 3} - {index}))
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-10", "step-40"]
    best, newest = (shoal.load_full_state(checkpoints, best=which) for which in (True, False))
    assert best.keys() == newest.keys()
    assert any((best[name] != newest[name]).any() for name in best)
