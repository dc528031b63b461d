"""A model split over ranks computes what one process computes, to 1e-10 in float64, for every kind of block that is known."""

from __future__ import annotations

import pytest

from tests.integration.tensor_parallel.models import MODELS


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_output_gradients_and_a_step_are_those_of_one_process(run, model, size):
    run("parity", size, model=model)


@pytest.mark.parametrize("model", ["nano-gpt", "llama", "torch encoder and decoder"])
def test_sequence_parallelism_computes_the_same(run, model):
    run("parity", 2, model=model, sequence_dimension=1)


def test_a_sequence_that_does_not_divide_computes_the_same(run):
    run("parity", 4, model="nano-gpt", sequence_dimension=1, length=7)


@pytest.mark.parametrize("model", ["torch encoder and decoder", "torch encoder layer, norm first", "nano-gpt"])
def test_evaluation_computes_the_same(run, model):
    run("evaluation", 2, model=model)


def test_dropout_as_one_process_draws_what_one_process_draws(run):
    run("dropout_as_one_process", 2)


def test_dropout_differs_between_shards_and_agrees_where_activations_are_whole(run):
    run("dropout_per_shard", 4)


@pytest.mark.parametrize("size", [2, 4])
def test_the_parallel_loss_is_that_of_one_process(run, size):
    run("parallel_loss", size)


def test_a_model_that_computes_its_loss_uses_the_parallel_one(run):
    run("loss_within_the_model", 2)


def test_multihead_attention_takes_masks_layouts_and_weights_as_torch_does(run):
    run("multihead_options", 2)


def test_activation_checkpointing_copies_and_frozen_parameters(run):
    run("checkpointed_copied_frozen", 2)


def test_bfloat16_autocast_stays_close_to_one_process(run):
    run("autocast", 2)
