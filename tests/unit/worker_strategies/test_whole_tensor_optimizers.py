"""Optimizers that look at whole tensors or rows: right where tensors are whole, refused where they are cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from torch import nn

Make = Callable[[nn.Module], torch.optim.Optimizer]
KINDS: list[Make] = [
    lambda net: shoal.optim.LAMB(net.parameters(), 0.05, weight_decay=0.1),
    lambda net: shoal.optim.RowWiseAdagrad(net.parameters(), 0.05),
]
X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize("kind", KINDS, ids=["lamb", "rowwise"])
@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_where_tensors_are_whole_they_take_the_steps_of_one_process(kind: Make, strategy: str) -> None:
    def train() -> dict[str, torch.Tensor]:
        net = network()
        model, optimizer = shoal.as_distributed(net, kind(net), strategy=strategy)
        loader = shoal.ElasticDataLoader(torch.utils.data.TensorDataset(X), global_batch_size=8, shuffle=False)
        for (x,) in loader:
            model.train_step(x, torch.zeros(len(x), 2), nn.functional.mse_loss)
            assert optimizer.step()
            optimizer.zero_grad()
        return model.full_state_dict()

    alone = network()
    optimizer = kind(alone)
    for batch in X.split(8):
        alone(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in shoal.launch(train, world_size=2)[0].items():
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS, ids=["lamb", "rowwise"])
@pytest.mark.parametrize("strategy", ["zero1", "zero3", "fsdp", "tensor"])
def test_strategies_that_cut_tensors_refuse_them(kind: Make, strategy: str) -> None:
    net = network()
    with pytest.raises(ConfigurationError, match="is not known to treat each element by itself"):
        shoal.as_distributed(net, kind(net), strategy=strategy)
