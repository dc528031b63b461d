"""Ranks whose scripts go different ways are told, and do not wait for each other again and again."""

from pathlib import Path

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote

SCRIPT = Path(__file__).parent / "evaluates_alone.py"


def test_an_operation_of_all_ranks_that_one_does_alone_ends_the_run_with_one_clear_error(zygote: Zygote, tmp_path: Path) -> None:
    with cluster(zygote, tmp_path, min_workers=2, max_workers=2, script=SCRIPT, SHOAL_COLLECTIVE_TIMEOUT_S="2") as running:
        running.start(0)
        running.start(1)
        for worker in (running.workers[0], running.workers[1]):
            assert worker.wait() == 1
            assert "were in an operation between steps, others in a step; every rank must call evaluate" in worker.said()
