"""A pipeline has the results of one process that accumulates the same micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from shoal_worker.pipelining.micro_batches import cut_batch
from shoal_worker.pipelining.schedule import schedule_names

from tests.integration.pipelining.models import (
    GPT,
    MODELS,
    Gradients,
    alone,
    batch,
    gradients_here,
    made,
    pipeline_of,
    train,
)
from tests.integration.pipelining.threads import run_line

_TOLERANCE = {"rtol": 0.0, "atol": 1e-10}


def _assert_gradients(found: list[Gradients], expected: Gradients) -> None:
    assert set().union(*found) == set(expected)
    for one in found:
        for name, gradient in one.items():
            wanted = expected[name]
            assert (gradient is None) == (wanted is None), f"{name}: {gradient} instead of {wanted}"
            if gradient is not None:
                torch.testing.assert_close(
                    gradient, wanted, **_TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
                )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", schedule_names())
def test_every_schedule_gives_the_gradients_of_one_process(
    schedule: str, name: str, ranks: int
) -> None:
    # 7 samples in 4 micro-batches: 2, 2, 2, 1
    module, (inputs, targets) = made(name), batch(name, 7)
    loss, gradients, _ = alone(module, cut_batch(inputs, targets, count=4))

    def body(rank: int, group: Any) -> Any:
        pipeline = pipeline_of(module, group, schedule=schedule)
        return train(pipeline, inputs, targets), gradients_here(pipeline)

    results = run_line(ranks, body)
    assert [one[0] for one in results] == pytest.approx([loss] * ranks, abs=1e-10)
    _assert_gradients([one[1] for one in results], gradients)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "zbv"])
def test_frozen_parameters_and_stages_without_trainable_ones_train_as_in_one_process(
    schedule: str,
) -> None:
    """The first half is frozen, so the stages after it get an input that requires no gradient."""
    module, (inputs, targets) = made("mlp"), batch("mlp", 7)
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    _, gradients, _ = alone(module, cut_batch(inputs, targets, count=4))

    def body(rank: int, group: Any) -> Any:
        pipeline = pipeline_of(module, group, schedule=schedule)
        train(pipeline, inputs, targets)
        frozen = gradients_here(pipeline)
        for parameter in pipeline.module.parameters():  # unfrozen in the middle of training
            parameter.grad = None
            parameter.requires_grad_(True)
        train(pipeline, inputs, targets)
        return frozen, gradients_here(pipeline)

    results = run_line(4, body)
    _assert_gradients([one[0] for one in results], gradients)
    thawed = copy.deepcopy(module).requires_grad_(True)
    _assert_gradients(
        [one[1] for one in results], alone(thawed, cut_batch(inputs, targets, count=4))[1]
    )


def test_token_weights_and_summed_losses_train_as_in_one_process() -> None:
    module, (inputs, targets) = made("gpt"), batch("gpt", 6)

    def tokens(_: torch.Tensor, own: torch.Tensor) -> float:
        return float((own > 3).sum())

    _, weighted, _ = alone(module, cut_batch(inputs, targets, count=3, weight_fn=tokens))
    parts = cut_batch(inputs, targets, count=3, weight_fn=lambda *_: 1.0)
    _, mean, _ = alone(module, parts)

    def body(rank: int, group: Any) -> Any:
        pipeline = pipeline_of(module, group, micro_batches=3)
        train(pipeline, inputs, targets, weight_fn=tokens)
        summed = pipeline_of(module, group, micro_batches=3, loss_reduction="sum")
        train(summed, inputs, targets)
        return gradients_here(pipeline), {
            name: None if g is None else g / 3 for name, g in gradients_here(summed).items()
        }

    results = run_line(2, body)
    _assert_gradients([one[0] for one in results], weighted)
    _assert_gradients([one[1] for one in results], mean)


@pytest.mark.parametrize(("name", "ranks"), [("gpt", 4), ("cnn", 2)])
def test_predict_gives_every_rank_the_output_in_evaluation_mode(name: str, ranks: int) -> None:
    module, (inputs, _) = made(name), batch(name, 5)
    expected = copy.deepcopy(module).eval()(inputs)

    def body(rank: int, group: Any) -> Any:
        pipeline = pipeline_of(module, group, schedule="interleaved_1f1b")
        output = pipeline.predict({"tokens": inputs} if name == "gpt" else inputs)
        assert pipeline.module.training
        return output

    for output in run_line(ranks, body):
        torch.testing.assert_close(output, expected, **_TOLERANCE)


def test_random_numbers_of_seeded_micro_batches_do_not_depend_on_the_schedule() -> None:
    """Ranks that are threads share torch's generator, so the test runs all stages on one rank."""
    torch.manual_seed(0)
    module, (inputs, targets) = GPT(dropout=0.5), batch("gpt", 8)

    def losses(schedule: str, seeds: list[int] | None) -> list[float]:
        def body(rank: int, group: Any) -> list[float]:
            pipeline = pipeline_of(module, group, schedule=schedule)
            return [train(pipeline, inputs, targets, seeds=seeds) for _ in range(2)]

        return run_line(1, body)[0]

    seeded = losses("looped_bfs", [11, 12, 13, 14])
    assert seeded[0] == seeded[1]
    assert losses("zbv", [11, 12, 13, 14]) == seeded
    assert losses("zbv", None) != seeded
