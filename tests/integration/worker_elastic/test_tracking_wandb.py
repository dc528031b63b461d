"""W&B contains a run as one W&B run with each step once, no matter which rank writes it and how
often it is interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.worker_elastic.cluster import cluster
from tests.wandbruns import environment, points, rows
from tests.zygote.children import Zygote

SCRIPT = Path(__file__).parent / "tracked_loop.py"
STEPS = 20
KILLED = 7


@pytest.mark.slow
def test_a_killed_rank_and_a_resume_leave_one_wandb_run_with_each_step_once(
    zygote: Zygote, tmp_path: Path
) -> None:
    """The rank that writes is killed after step 7. The other one continues alone and is killed two
    steps after the checkpoint of step 8. Two new workers repeat these steps, with a new
    coordinator."""
    places = {"CHECKPOINTS": str(tmp_path / "checkpoints"), **environment(tmp_path)}
    (tmp_path / "first").mkdir()
    with cluster(zygote, tmp_path / "first", script=SCRIPT, max_workers=2, **places) as running:
        running.start(0, SHOAL_FAILPOINTS=f"session.after_commit@{KILLED}=kill")
        running.start(1, SHOAL_FAILPOINTS="session.after_commit@10=kill")
        assert all(worker.wait() != 0 for worker in running.workers.values()), running.said()
    (before,) = rows(tmp_path).values()
    written = [step for step, _ in points(before, "shoal/world_size")]
    assert written == list(range(1, len(written) + 1))
    assert len(written) >= 4, "the script waited for these rows"
    (tmp_path / "second").mkdir()
    with cluster(zygote, tmp_path / "second", script=SCRIPT, max_workers=2, **places) as running:
        running.start(0)
        running.start(1)
        assert all(worker.wait() == 0 for worker in running.workers.values()), running.said()
    ((run_id, found),) = rows(tmp_path).items()
    assert run_id.startswith("job-")
    steps = [step for step, _ in points(found, "shoal/world_size")]
    missing = set(range(1, STEPS + 1)) - set(steps)
    assert steps == sorted(set(steps)), "each step once"
    assert missing <= {5, 6, 7, 8}, "only those that both killed ranks had not written"
    losses = points(found, "shoal/loss")
    assert all(loss == step for step, loss in losses)
    assert [step for step, _ in losses] == sorted({step for step, _ in losses})
