"""The whole model's state, gathered from the stages and loaded into others; and what a pipeline sends."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from shoal_worker.pipelining.pipeline import Pipeline, PipelineSettings
from torch import nn

from tests.integration.pipelining.models import VOCABULARY, batch, cross_entropy, made
from tests.integration.pipelining.threads import run_line


def _trained(name: str, ranks: int, schedule: str) -> list[dict[str, torch.Tensor]]:
    module, (inputs, targets) = made(name), batch(name, 6)

    def body(rank: int, group: Any) -> dict[str, torch.Tensor]:
        pipeline = Pipeline(copy.deepcopy(module), PipelineSettings(schedule=schedule, micro_batches=2), group=group)
        pipeline.release()
        optimizer = torch.optim.AdamW(pipeline.parameters(), 1e-2)
        for _ in range(3):
            pipeline.train_step(inputs, targets, cross_entropy)
            pipeline.reduce_gradients()
            pipeline.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        return pipeline.full_state_dict(rank0_only=True)

    return run_line(ranks, body)


@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_a_trained_state_loads_into_any_number_of_stages_and_into_the_plain_model(name: str) -> None:
    first, *others = _trained(name, 2, "1f1b")
    assert others == [{}]
    inputs, _ = batch(name, 3)
    plain = made(name)
    assert list(first) == list(plain.state_dict())
    plain.load_state_dict(first)  # strict
    expected = plain.eval()(inputs)

    def body(rank: int, group: Any) -> Any:
        pipeline = Pipeline(made(name), PipelineSettings(schedule="zbv"), group=group)
        pipeline.release()
        pipeline.load_full_state_dict(first)
        return pipeline.predict(inputs), pipeline.full_state_dict(), pipeline.gather_full_parameters()

    for output, state, parameters in run_line(3, body):
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
        assert all(torch.equal(state[key], value) for key, value in first.items())
        assert list(parameters) == [key for key, _ in plain.named_parameters()]


def test_tied_weights_stay_equal_and_as_in_one_process() -> None:
    """AdamW over three steps, with clipping: the copies of two stages never part."""
    module, (inputs, targets) = made("gpt"), batch("gpt", 6)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    for _ in range(3):
        cross_entropy(module(inputs), targets).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    state = _trained("gpt", 4, "1f1b")[0]
    for key, value in module.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=1e-9)
    assert torch.equal(state["head.weight"], state["transformer.wte.weight"])


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    def body(rank: int, group: Any) -> None:
        pipeline = Pipeline(made("mlp"), PipelineSettings(), group=group)
        before = [p.detach().clone() for p in pipeline.parameters()]
        state = {key: value + 1 for key, value in made("mlp").state_dict().items()}
        with pytest.raises(ConfigurationError, match=r"lacks \['0.0.bias'\]"):
            pipeline.load_full_state_dict({key: value for key, value in state.items() if key != "0.0.bias"})
        with pytest.raises(ConfigurationError, match=r"'2.weight' has shape \(4, 6\)"):
            pipeline.load_full_state_dict({**state, "2.weight": torch.zeros(4, 6)})
        assert all(torch.equal(a, b) for a, b in zip(before, pipeline.parameters(), strict=True))

    run_line(2, body)


def test_a_released_module_can_be_split_again_and_given_values() -> None:
    original, (inputs, targets) = made("gpt"), batch("gpt", 4)

    def body(rank: int, group: Any) -> float:
        module = copy.deepcopy(original)
        Pipeline(module, PipelineSettings(), group=group).release()
        held = sum(p.numel() for p in module.parameters() if not p.is_meta)
        assert held < sum(p.numel() for p in module.parameters())
        again = Pipeline(module, PipelineSettings(cut_points=["transformer.h.1"], schedule="gpipe"), group=group)
        assert again.lacks_values == (rank == 1)
        if again.lacks_values:
            with pytest.raises(PreconditionError, match="load_full_state_dict"):
                again.train_step(inputs, targets, cross_entropy)
            again.load_full_state_dict(original.state_dict())
        return float(again.train_step(inputs, targets, cross_entropy))

    expected = cross_entropy(original(inputs), targets).item()
    assert run_line(2, body) == pytest.approx([expected] * 2, abs=1e-10)


@pytest.mark.parametrize(("schedule", "borders"), [("1f1b", 3), ("gpipe", 3), ("interleaved_1f1b", 7), ("zbv", 6)])
def test_a_step_sends_activations_and_gradients_at_the_borders_between_ranks_and_no_more(schedule: str, borders: int) -> None:
    """SPEC.md 2. ZBV's middle border lies within one rank. The embedding's and the scale's gradients go to their owner and back."""
    rows, length, width = 7, 5, 8
    module, (inputs, targets) = made("gpt"), batch("gpt", rows)

    def body(rank: int, group: Any) -> Any:
        pipeline = Pipeline(copy.deepcopy(module), PipelineSettings(schedule=schedule), group=group)
        pipeline.train_step(inputs, targets, cross_entropy)
        headers = pipeline.traffic.headers
        pipeline.train_step(inputs, targets, cross_entropy)
        assert pipeline.traffic.headers == headers  # shapes are known by then
        pipeline.reduce_gradients()
        return pipeline.traffic, pipeline.split

    results = run_line(4, body)
    activation = rows * length * width * 8
    assert sum(one.activations for one, _ in results) == 2 * borders * activation
    assert sum(one.gradients for one, _ in results) == 2 * borders * activation
    tied = 0 if schedule == "zbv" else 2 * VOCABULARY * width * 8
    assert sum(one.shared for one, _ in results) == tied + 3 * 2 * 8
    assert sum(one.headers for one, _ in results) == borders * 2 * 1024  # micro-batches of 2 samples and of 1
