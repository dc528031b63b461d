"""Plans, gradients and state of a model that is split over real ranks."""

from __future__ import annotations

from shoal_worker.launch import launch

from tests.integration.tensor_parallel.state_cases import alone_in_its_group


def test_gradients_over_replicas_and_their_norm_are_those_of_the_whole_batch(run):
    run("gradients_over_replicas", 2)


def test_what_two_ranks_gathered_loads_into_four_and_into_a_plain_model(run, tmp_path):
    run("gathered", 2, path=str(tmp_path / "full.pt"))
    run("loaded", 4, path=str(tmp_path / "full.pt"))


def test_the_first_ranks_values_win_and_the_others_may_be_on_meta(run):
    run("from_meta", 2)


def test_a_plan_for_another_model_or_size_is_refused(run):
    run("mismatched", 2)


def test_on_one_rank_the_model_stays_as_it_is():
    launch(alone_in_its_group, world_size=1)
