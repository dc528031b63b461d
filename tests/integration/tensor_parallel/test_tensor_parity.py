"""A model sharded over ranks computes what one process computes, to 1e-10 in float64, for every
known kind of block."""

from __future__ import annotations

import pytest

from tests.integration.tensor_parallel.models import MODELS
from tests.integration.tensor_parallel.more_models import MORE


@pytest.mark.parametrize("model", MODELS)
def test_output_gradients_and_a_step_on_two_ranks_match_one_process(run_threads, model):
    run_threads("parity", model=model)


@pytest.mark.parametrize(
    "model",
    [
        model if model == "nano-gpt" else pytest.param(model, marks=pytest.mark.matrix)
        for model in MODELS
    ],
)
def test_output_gradients_and_a_step_on_four_ranks_match_one_process(run, model):
    run("parity", 4, model=model)


@pytest.mark.parametrize(
    "model",
    [
        model if number < 2 else pytest.param(model, marks=pytest.mark.matrix)
        for number, model in enumerate(MORE)
    ],
)
def test_less_common_models_match_one_process(run_threads, model):
    run_threads("more", model=model)


@pytest.mark.parametrize("model", ["nano-gpt", "llama", "torch encoder and decoder"])
def test_sequence_parallelism_matches_one_process(run_threads, model):
    run_threads("parity", model=model, sequence_dimension=1)


def test_sequence_length_that_does_not_divide_matches_one_process(run):
    run("parity", 4, model="nano-gpt", sequence_dimension=1, length=7)


@pytest.mark.parametrize(
    "model", ["torch encoder and decoder", "torch encoder layer, norm first", "nano-gpt"]
)
def test_evaluation_matches_one_process(run_threads, model):
    run_threads("evaluation", model=model)


def test_dropout_draws_the_same_numbers_as_one_process(run_threads):
    run_threads("dropout_as_one_process")


def test_dropout_differs_between_shards_and_agrees_on_unsharded_activations(run):
    run("dropout_per_shard", 4)


def test_parallel_loss_matches_one_process(run, run_threads):
    run_threads("parallel_loss")
    run("parallel_loss", 4)


def test_a_model_that_computes_its_loss_uses_the_parallel_one(run_threads):
    run_threads("loss_within_the_model")


def test_multihead_attention_accepts_masks_layouts_and_weights_like_torch(run_threads):
    run_threads("multihead_options")


def test_checkpointing_copies_torch_compile_and_frozen_parameters_match_one_process(run_threads):
    run_threads("checkpointed_copied_compiled_frozen")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_checkpoint_recomputed_within_a_loss_gives_the_gradients_of_one_process(run, elsewhere):
    run("checkpointed_within_a_loss", 2, elsewhere=elsewhere)


def test_bfloat16_autocast_stays_close_to_one_process(run_threads):
    run_threads("autocast")


def test_blocks_with_uninformative_names_are_found_by_tracing(run_threads):
    run_threads("traced")


def test_user_plan_matches_one_process_whatever_it_splits(run_threads):
    run_threads("asked")


def test_random_functions_other_than_dropout_are_refused_on_shards(run_threads):
    run_threads("refused_randomness")
