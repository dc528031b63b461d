"""A script that sets `p.grad` instead of running a backward pass trains as in one process, or is
refused."""

from typing import Any

import pytest
import shoal
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

X = torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def train(strategy: str | None, cleared: bool = False) -> dict[str, torch.Tensor]:
    """Trains with the gradients that `torch.autograd.grad` returns.

    cleared: clear these gradients, and run a backward pass instead.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    model: Any = net
    batches: Any = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 24, 8)]
    if strategy is not None:
        model, optimizer = shoal.as_distributed(net, optimizer, strategy=strategy)
        batches = shoal.ElasticDataLoader(TensorDataset(X, Y), global_batch_size=8, shuffle=False)
    for x, y in batches:
        parameters = list(net.parameters())
        gradients = torch.autograd.grad(functional.mse_loss(model(x), y), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if cleared:
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict() if strategy is None else model.full_state_dict()


@pytest.mark.parametrize("strategy", ["ddp", "tensor"])
def test_gradients_set_without_a_backward_pass_are_summed(strategy: str) -> None:
    expected = train(None)
    for state in shoal.launch(train, strategy, world_size=2):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "fsdp", "hsdp"])
def test_gradients_that_no_shard_would_receive_are_refused(strategy: str) -> None:
    with pytest.raises(shoal.ConfigurationError, match=r"cannot set the gradient of '0\.weight'"):
        shoal.launch(train, strategy, world_size=2)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_gradients_that_the_script_clears_do_not_count(strategy: str) -> None:
    expected = train(None, cleared=True)
    for state in shoal.launch(train, strategy, True, world_size=2):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)
