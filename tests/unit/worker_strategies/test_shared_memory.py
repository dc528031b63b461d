"""Tensors of a model that share memory without being the same object are refused if training would
update them separately, and trained correctly otherwise."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import shoal
import torch
from torch import nn

STRATEGIES = [
    "zero1",
    "zero2",
    "zero3",
    "fsdp",
    "hsdp",
    "tensor",
    "hybrid",
    "pipeline",
    "local_sgd",
    "async_sgd",
]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


def distribute(model: nn.Module, strategy: str) -> None:
    options = {"pipeline": {"micro_batches": 2}}.get(strategy, {})
    shoal.launch(
        lambda: shoal.as_distributed(
            model, torch.optim.SGD(model.parameters(), 0.1), strategy=strategy, **options
        ),
        world_size=1,
    )


def by_data(model: Tied) -> None:
    model.decoder.weight.data = model.encoder.weight.data.t()


def by_another_parameter(model: Tied) -> None:
    model.decoder.weight = nn.Parameter(model.encoder.weight.data.view(6, 8))


def half_of_it(model: Tied) -> None:
    model.decoder.bias.data = model.encoder.weight.data[4, :]


def one_frozen(model: Tied) -> None:
    by_another_parameter(model)
    model.decoder.weight.requires_grad_(False)


@pytest.mark.parametrize("tie", [by_data, by_another_parameter, half_of_it, one_frozen])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_parameters_with_shared_memory_are_refused(
    strategy: str, tie: Callable[[Tied], None]
) -> None:
    model = Tied()
    tie(model)
    with pytest.raises(
        shoal.ConfigurationError,
        match=r"'encoder\.weight' and parameter 'decoder.*the same nn\.Parameter",
    ):
        distribute(model, strategy)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "tensor"])
def test_buffer_that_shares_memory_with_a_trained_parameter_is_refused(strategy: str) -> None:
    model = Tied()
    model.register_buffer("seen", model.encoder.weight.data[:2])
    with pytest.raises(
        shoal.ConfigurationError, match=re.escape("buffer 'seen' are two tensors that share memory")
    ):
        distribute(model, strategy)


def test_two_models_with_shared_memory_are_refused() -> None:
    first, second = Tied(), Tied()
    second.encoder.weight.data = first.encoder.weight.data
    optimizers = tuple(torch.optim.SGD(model.parameters(), 0.1) for model in (first, second))
    with pytest.raises(
        shoal.ConfigurationError,
        match=r"'encoder\.weight' of model 0 and parameter 'encoder\.weight' of model 1 are two",
    ):
        shoal.launch(
            lambda: shoal.as_distributed((first, second), optimizers, strategy="zero1"),
            world_size=1,
        )


def side_by_side(model: Tied) -> None:
    flat = torch.zeros(100)
    model.encoder.weight.data, model.decoder.weight.data = (
        flat[:48].view(8, 6),
        flat[48:96].view(6, 8),
    )


def in_columns(model: Tied) -> None:
    both = torch.zeros(8, 14)
    model.encoder.weight.data, model.decoder.weight.data = both[:, :6], both[:, 6:12].t()


def both_frozen(model: Tied) -> None:
    by_data(model)
    model.encoder.weight.requires_grad_(False)
    model.decoder.weight.requires_grad_(False)


def the_same_parameter(model: Tied) -> None:
    model.decoder.bias = nn.Parameter(torch.zeros(8))
    model.encoder.bias = model.decoder.bias


@pytest.mark.parametrize("lay_out", [side_by_side, in_columns, both_frozen, the_same_parameter])
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_tensors_of_one_storage_without_common_elements_are_accepted(
    strategy: str, lay_out: Callable[[Tied], None]
) -> None:
    model = Tied()
    lay_out(model)
    distribute(model, strategy)


@pytest.mark.parametrize("tie", [by_data, by_another_parameter])
def test_two_parameters_with_shared_memory_under_ddp_train_as_in_one_process(
    tie: Callable[[Tied], None],
) -> None:
    samples = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def make() -> tuple[Tied, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Tied().double()
        tie(model)
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def train(model: Any, optimizer: Any, batches: Any) -> dict[str, torch.Tensor]:
        for (x,) in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()
        return {
            name.removeprefix("module."): value.clone()
            for name, value in model.state_dict().items()
        }

    def one() -> dict[str, torch.Tensor]:
        model, optimizer = shoal.as_distributed(*make())
        data = torch.utils.data.TensorDataset(samples)
        return train(
            model, optimizer, shoal.ElasticDataLoader(data, global_batch_size=4, shuffle=False)
        )

    expected = train(*make(), [(samples[i : i + 4],) for i in range(0, 12, 4)])
    for state in shoal.launch(one, world_size=2):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)
