"""Unmodified transformers models, with their caches and masks, are sharded without a plan, and
train and generate as in one process."""

from __future__ import annotations

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError, PreconditionError

from tests.integration.tensor_parallel.transformers_models import (
    FAMILIES,
    GENERATING,
    LENGTH,
    batch,
    build,
)

TOLERANCE = 1e-9
STEPS = 3
NEW = 6
QUICK = ("llama", "bert", "vit")


def _each(families):
    long = {
        family: pytest.mark.slow if family in ("gpt2", "t5") else pytest.mark.matrix
        for family in families
    }
    return [
        family if family in QUICK else pytest.param(family, marks=long[family])
        for family in families
    ]


def _train(family, model, optimizer):
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch(family, step)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _prompt(family):
    received = batch(family, 9)
    return {
        "input_ids": received["input_ids"],
        "attention_mask": torch.ones_like(received["attention_mask"]),
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "do_sample": False,
        "pad_token_id": 0,
    }


@pytest.mark.parametrize("family", _each(FAMILIES))
def test_model_family_split_over_two_ranks_trains_as_in_one_process(family):
    alone = build(family)
    expected = _train(family, alone, torch.optim.SGD(alone.parameters(), 0.1))

    def rank():
        net = build(family)
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.1), strategy="tensor"
        )
        losses = _train(family, model, optimizer)
        held = sum(part.numel() for part in model.local_shard.values())
        return losses, model.full_state_dict(), held

    outcomes = shoal.launch(rank, world_size=2)
    everything = sum(parameter.numel() for parameter in alone.parameters())
    for losses, state, held in outcomes:
        assert losses == pytest.approx(expected, abs=TOLERANCE)
        assert held < 0.65 * everything, "each rank holds about half of it"
        for name, tensor in alone.state_dict().items():
            torch.testing.assert_close(
                state[name],
                tensor,
                rtol=0,
                atol=TOLERANCE,
                msg=lambda received, name=name: f"{name}: {received}",
            )


@pytest.mark.parametrize("family", _each(GENERATING))
def test_model_family_split_over_two_ranks_generates_as_in_one_process(family):
    alone = build(family).eval()
    expected = alone.generate(**_prompt(family))

    def rank():
        net = build(family)
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.0), strategy="tensor"
        )
        _train(family, model, optimizer)  # an empty step places the model on the ranks
        model.eval()
        return model.generate(**_prompt(family)), model.config.model_type

    for words, kind in shoal.launch(rank, world_size=2):
        assert words.shape[-1] >= NEW + (1 if family == "t5" else LENGTH)
        assert torch.equal(words, expected)
        assert kind == alone.config.model_type


def test_sampled_tokens_are_the_same_on_ranks_whose_random_numbers_are_not():
    def rank():
        net = build("llama")
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.0), strategy="tensor"
        )
        _train("llama", model, optimizer)
        model.eval()
        torch.manual_seed(shoal.rank())
        words = model.generate(**_prompt("llama") | {"do_sample": True, "temperature": 2.0})
        return words, torch.rand(())

    (first, one), (second, other) = shoal.launch(rank, world_size=2)
    assert torch.equal(first, second)
    assert one != other, "afterwards each has its own again"


def test_tokens_are_not_chosen_from_split_logits():
    def rank():
        net = build("llama")
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.0), strategy="tensor", loss_parallel=True
        )
        _train("llama", model, optimizer)
        with pytest.raises(
            ConfigurationError, match=r"loss_parallel=True.*model\.clone\(\)\.generate"
        ):
            model.generate(**_prompt("llama"))

    shoal.launch(rank, world_size=2)


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        pytest.param("zero1", marks=pytest.mark.slow),
        pytest.param("zero2", marks=pytest.mark.matrix),
    ],
)
def test_ranks_with_all_values_generate_independently(strategy):
    expected = [
        build("llama").eval().generate(**_prompt("llama") | {"max_new_tokens": NEW + rank})
        for rank in range(2)
    ]

    def rank():
        net = build("llama")
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.0), strategy=strategy
        )
        _train("llama", model, optimizer)
        model.eval()
        return model.generate(**_prompt("llama") | {"max_new_tokens": NEW + shoal.rank()})

    for words, wanted in zip(shoal.launch(rank, world_size=2), expected, strict=True):
        assert torch.equal(words, wanted)


@pytest.mark.parametrize(
    "strategy", ["zero3", "pipeline", pytest.param("fsdp", marks=pytest.mark.matrix)]
)
def test_generate_with_gathered_parameters_is_refused_with_an_alternative(
    strategy,
):
    expected = build("llama").eval().generate(**_prompt("llama"))

    def rank():
        net = build("llama")
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.0), strategy=strategy
        )
        received = batch("llama", 0)
        model.train_step(received)
        optimizer.step()
        with pytest.raises(PreconditionError, match=r"generate\(\) .*model\.clone\(\)\.generate"):
            model.generate(**_prompt("llama"))
        return model.clone().eval().generate(**_prompt("llama"))

    for words in shoal.launch(rank, world_size=2):
        assert torch.equal(words, expected)


def test_a_model_without_generate_says_so():
    def rank():
        net = torch.nn.Linear(4, 4)
        model, _ = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        with pytest.raises(AttributeError, match="generate"):
            model.generate()

    shoal.launch(rank, world_size=1)
