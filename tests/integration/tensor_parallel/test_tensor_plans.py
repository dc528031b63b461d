"""Plans that do not fit their model, and groups of one rank."""

from __future__ import annotations

from shoal_worker.launch import launch

from tests.integration.tensor_parallel.plan_cases import alone_in_its_group


def test_a_plan_for_another_model_or_size_is_refused(run):
    run("mismatched", 2)


def test_one_rank_leaves_the_model_unchanged():
    launch(alone_in_its_group, world_size=1)
