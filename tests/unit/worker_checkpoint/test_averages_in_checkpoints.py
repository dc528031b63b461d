"""`load_full_state(average=)` reads an averaged model from a checkpoint, for the plain module."""

from __future__ import annotations

from pathlib import Path

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.optim.swa_utils import AveragedModel


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def train(directory: Path, strategy: str, *, averages: int = 2) -> list[dict[str, torch.Tensor]]:
    """Trains one step, saves, and returns the plain state of each average: of the model that
    as_distributed returned, and of the module that was passed to it."""
    torch.manual_seed(0)
    net = make_net()
    plain = make_net()
    plain.load_state_dict(net.state_dict())
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy
    )
    made = [AveragedModel(model)] if averages else []
    if averages > 1:
        made.append(AveragedModel(plain))
    torch.manual_seed(1)
    model(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()
    for number, average in enumerate(made, start=1):
        with torch.no_grad():
            for parameter in average.parameters():
                parameter.fill_(number)
    shoal.save_checkpoint(directory)
    states = [average.module.state_dict() for average in made]
    return [
        {name.replace("module.", ""): each.clone() for name, each in state.items()}
        for state in states
    ]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_average_loads_into_the_plain_module(tmp_path: Path, strategy: str) -> None:
    expected = shoal.launch(lambda: train(tmp_path, strategy), world_size=2)[0]
    for number, state in enumerate(expected):
        net = make_net()
        net.load_state_dict(shoal.load_full_state(tmp_path, average=number))
        assert net.state_dict().keys() == state.keys()
        for name, tensor in net.state_dict().items():
            assert torch.equal(tensor, state[name]), name
        assert net[2].weight[0, 0] == number + 1
    assert shoal.load_full_state(tmp_path)["2.weight"][0, 0] != 1


@pytest.mark.parametrize(
    ("averages", "options", "message"),
    [
        (2, {"average": 2}, "has 2 averaged models, but average=2; expected a number from 0 to 1"),
        (0, {"average": 0}, "has 0 averaged models, but average=0, in the order"),
        (2, {"average": 0, "model": 0}, "expected one of them"),
    ],
)
def test_average_missing_from_the_checkpoint_is_refused(
    tmp_path: Path, averages: int, options: dict[str, int], message: str
) -> None:
    shoal.launch(lambda: train(tmp_path, "ddp", averages=averages), world_size=1)
    with pytest.raises(ConfigurationError, match=message):
        shoal.load_full_state(tmp_path, **options)
