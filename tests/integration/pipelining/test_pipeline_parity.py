"""A pipeline gives what one process gives that accumulates the same micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from shoal_common.errors import PreconditionError
from shoal_worker.pipelining.micro_batches import cut_batch
from shoal_worker.pipelining.pipeline import Pipeline, PipelineSettings
from shoal_worker.pipelining.schedule import schedule_names
from torch import nn

from tests.integration.pipelining.models import GPT, MODELS, Gradients, alone, batch, cross_entropy, made
from tests.integration.pipelining.threads import run_grid, run_line

_TOLERANCE = {"rtol": 0.0, "atol": 1e-10}


def _pipeline(module: nn.Module, group: Any, data_group: Any = None, **settings: Any) -> Pipeline:
    pipeline = Pipeline(copy.deepcopy(module), PipelineSettings(**settings), group=group, data_group=data_group)
    pipeline.release()
    return pipeline


def _gradients(pipeline: Pipeline) -> Gradients:
    return {name: p.grad for name, p in pipeline.named_parameters().items()}


def _assert_gradients(found: list[Gradients], expected: Gradients) -> None:
    assert set().union(*found) == set(expected)
    for one in found:
        for name, gradient in one.items():
            wanted = expected[name]
            assert (gradient is None) == (wanted is None), f"{name}: {gradient} instead of {wanted}"
            if gradient is not None:
                torch.testing.assert_close(gradient, wanted, **_TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", schedule_names())
def test_every_schedule_gives_the_gradients_of_one_process(schedule: str, name: str, ranks: int) -> None:
    module, (inputs, targets) = made(name), batch(name, 7)  # 7 samples in 4 micro-batches: 2, 2, 2, 1
    loss, gradients, state = alone(module, cut_batch(inputs, targets, count=4))

    def body(rank: int, group: Any) -> Any:
        pipeline = _pipeline(module, group, schedule=schedule)
        found = float(pipeline.train_step(inputs, targets, cross_entropy))
        assert pipeline.reduce_gradients() == 7
        return found, _gradients(pipeline), pipeline.full_state_dict(), pipeline.in_flight, pipeline.schedule_of(4).in_flight(rank)

    results = run_line(ranks, body)
    assert [one[0] for one in results] == pytest.approx([loss] * ranks, abs=1e-10)
    _assert_gradients([one[1] for one in results], gradients)
    for _, _, found, in_flight, expected in results:
        assert list(found) == list(state)
        for key, value in state.items():  # BatchNorm's statistics among them
            torch.testing.assert_close(found[key], value, **_TOLERANCE)
        assert in_flight == expected


@pytest.mark.parametrize("schedule", ["gpipe", "zbv", "zero_bubble", "dualpipe_v"])
def test_replicas_average_the_gradients_of_all_their_batches_by_weight(schedule: str) -> None:
    """Split backward passes too, whose gradients DDP's hooks would leave unreduced."""
    module = made("gpt")
    shares = [batch("gpt", 6), batch("gpt", 3, seed=2)]
    loss, gradients, _ = alone(module, [one for share in shares for one in cut_batch(*share, count=3)])

    def body(rank: int, replica: int, group: Any, data: Any) -> Any:
        pipeline = _pipeline(module, group, data, schedule=schedule, micro_batches=3)
        own = float(pipeline.train_step(*shares[replica], cross_entropy))
        assert pipeline.reduce_gradients() == 9
        sizes = sum(p.numel() + 1 for p in pipeline.parameters()) * 8
        assert pipeline.data_bytes == sizes  # the gradients, and for each whether there is one
        return own, _gradients(pipeline), float(pipeline.clip_grad_norm_(0.1))

    results = run_grid(2, 2, body)
    assert (6 * results[0][0][0] + 3 * results[1][1][0]) / 9 == pytest.approx(loss, abs=1e-10)
    norm = float(torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in gradients.values() if g is not None])))
    assert [one[2] for line in results for one in line] == pytest.approx([norm] * 4, abs=1e-10)
    clipped = {key: g * 0.1 / (norm + 1e-6) for key, g in gradients.items() if g is not None}
    for line in results:
        _assert_gradients([one[1] for one in line], clipped)


def test_a_replica_without_samples_takes_part_with_weight_nought() -> None:
    module, (inputs, targets) = made("mlp"), batch("mlp", 5)
    _, gradients, _ = alone(module, cut_batch(inputs, targets, count=4))

    def body(rank: int, replica: int, group: Any, data: Any) -> Any:
        pipeline = _pipeline(module, group, data)
        if replica == 0:
            pipeline.train_step(inputs, targets, cross_entropy)
        assert pipeline.reduce_gradients() == 5
        return _gradients(pipeline)

    for line in run_grid(2, 2, body):
        _assert_gradients(line, gradients)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_two_train_steps_before_the_optimizer_add_up_by_weight_and_old_gradients_stay(schedule: str) -> None:
    module = made("gpt")
    first, second = batch("gpt", 8), batch("gpt", 2, seed=2)  # the second is a short last batch: 2 micro-batches
    _, gradients, _ = alone(module, [*cut_batch(*first, count=4), *cut_batch(*second, count=4)])

    def body(rank: int, group: Any) -> Any:
        pipeline = _pipeline(module, group, schedule=schedule)
        for _ in range(2):
            pipeline.train_step(*first, cross_entropy)
            pipeline.train_step(*second, cross_entropy)
            with pytest.raises(PreconditionError, match="reduce_gradients"):
                pipeline.clip_grad_norm_(1.0)
            pipeline.reduce_gradients()
        return {name: None if g is None else g / 2 for name, g in _gradients(pipeline).items()}

    _assert_gradients(run_line(2, body), gradients)


def test_a_step_that_was_discarded_leaves_the_gradients_from_before() -> None:
    module, (inputs, targets) = made("mlp"), batch("mlp", 4)
    _, gradients, _ = alone(module, cut_batch(inputs, targets, count=4))

    def body(rank: int, group: Any) -> Any:
        pipeline = _pipeline(module, group)
        pipeline.train_step(inputs, targets, cross_entropy)
        pipeline.reduce_gradients()
        pipeline.train_step(inputs + 1, targets, cross_entropy)
        pipeline.discard_step()
        return _gradients(pipeline)

    _assert_gradients(run_line(2, body), gradients)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "zbv"])
def test_frozen_parameters_and_stages_without_trainable_ones(schedule: str) -> None:
    """The first half is frozen, so that the stages after it get an input that wants no gradient."""
    module, (inputs, targets) = made("mlp"), batch("mlp", 7)
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    _, gradients, _ = alone(module, cut_batch(inputs, targets, count=4))

    def body(rank: int, group: Any) -> Any:
        pipeline = _pipeline(module, group, schedule=schedule)
        pipeline.train_step(inputs, targets, cross_entropy)
        pipeline.reduce_gradients()
        frozen = _gradients(pipeline)
        for parameter in pipeline.parameters():  # thawed in the middle of training
            parameter.grad = None
            parameter.requires_grad_(True)
        pipeline.train_step(inputs, targets, cross_entropy)
        pipeline.reduce_gradients()
        return frozen, _gradients(pipeline)

    results = run_line(4, body)
    _assert_gradients([one[0] for one in results], gradients)
    thawed = copy.deepcopy(module).requires_grad_(True)
    _assert_gradients([one[1] for one in results], alone(thawed, cut_batch(inputs, targets, count=4))[1])


def test_weights_by_tokens_and_sums_of_losses() -> None:
    module, (inputs, targets) = made("gpt"), batch("gpt", 6)

    def tokens(_: torch.Tensor, own: torch.Tensor) -> float:
        return float((own > 3).sum())

    _, weighted, _ = alone(module, cut_batch(inputs, targets, count=3, weight_fn=tokens))
    parts = cut_batch(inputs, targets, count=3, weight_fn=lambda *_: 1.0)
    _, mean, _ = alone(module, parts)

    def body(rank: int, group: Any) -> Any:
        pipeline = _pipeline(module, group, micro_batches=3)
        pipeline.train_step(inputs, targets, cross_entropy, weight_fn=tokens)
        pipeline.reduce_gradients()
        summed = _pipeline(module, group, micro_batches=3, loss_reduction="sum")
        summed.train_step(inputs, targets, cross_entropy)
        summed.reduce_gradients()
        return _gradients(pipeline), {name: None if g is None else g / 3 for name, g in _gradients(summed).items()}

    results = run_line(2, body)
    _assert_gradients([one[0] for one in results], weighted)
    _assert_gradients([one[1] for one in results], mean)


@pytest.mark.parametrize(("name", "ranks"), [("gpt", 4), ("cnn", 2)])
def test_predict_gives_every_rank_the_output_in_evaluation_mode(name: str, ranks: int) -> None:
    module, (inputs, _) = made(name), batch(name, 5)
    expected = copy.deepcopy(module).eval()(inputs)

    def body(rank: int, group: Any) -> Any:
        pipeline = _pipeline(module, group, schedule="interleaved_1f1b")
        everywhere = pipeline.predict({"tokens": inputs} if name == "gpt" else inputs)
        assert pipeline.module.training
        return everywhere, pipeline.predict(inputs, everywhere=False)

    results = run_line(ranks, body)
    for everywhere, _ in results:
        torch.testing.assert_close(everywhere, expected, **_TOLERANCE)
    assert [here is not None for _, here in results] == [False] * (ranks - 1) + [True]


def test_random_numbers_of_seeded_micro_batches_do_not_depend_on_the_schedule() -> None:
    """Threads share torch's generator, so the stages run one after the other: of one rank."""
    torch.manual_seed(0)
    module, (inputs, targets) = GPT(dropout=0.5), batch("gpt", 8)

    def losses(schedule: str, seeds: list[int] | None) -> list[float]:
        def body(rank: int, group: Any) -> list[float]:
            pipeline = _pipeline(module, group, schedule=schedule)
            return [float(pipeline.train_step(inputs, targets, cross_entropy, seeds=seeds)) for _ in range(2)]

        return run_line(1, body)[0]

    seeded = losses("looped_bfs", [11, 12, 13, 14])
    assert seeded[0] == seeded[1]
    assert losses("zbv", [11, 12, 13, 14]) == seeded
    assert losses("zbv", None) != seeded
