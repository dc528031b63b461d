"""Tensor parallelism sends what SPEC.md 2 says: two all-reduces of the activations per block and
direction."""

from __future__ import annotations

import pytest

from tests.integration.tensor_parallel.models import BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_needs_two_all_reduces_of_its_activations_in_each_direction(run, block):
    run("block_communication", 4, block=block)


def test_sequence_parallelism_sends_the_same_bytes(run):
    run("sequence_communication", 2)


def test_plan_predicts_the_bytes_that_a_model_sends(run):
    run("model_communication", 2)
