"""Changes that a module makes in its passes, and a script in a registered object, count once per
step, even if a step is lost and another worker joins."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote

SCRIPT = Path(__file__).parent / "counts_passes.py"
STEPS = 20


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp", "hsdp"])
def test_module_state_after_a_lost_step_and_a_join_is_that_without_faults(
    zygote: Zygote, tmp_path: Path, strategy: str
) -> None:
    with cluster(
        zygote, tmp_path, min_workers=2, max_workers=2, script=SCRIPT, STRATEGY=strategy
    ) as running:
        running.start(0, SHOAL_FAILPOINTS="reduction.completed@5=kill")
        running.start(1)
        assert running.workers[0].wait() == -signal.SIGKILL
        running.start(2)
        survivor, joiner = running.finish(1, 2)
    for result in (survivor, joiner):
        assert result["steps"] == result["buffer"] == STEPS
        assert result["extra"] == {"passes": STEPS}
        assert result["seen"] == [STEPS] * 3
        assert result["frozen"] == (STEPS if strategy == "ddp" else 0)
    assert survivor["lost"] == 1
    assert survivor["number"] == survivor["tensor"] == STEPS
