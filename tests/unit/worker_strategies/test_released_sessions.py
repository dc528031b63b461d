"""A process that trains several times, as a notebook does, keeps nothing of earlier sessions."""

from __future__ import annotations

import gc

import pytest
import shoal
import torch
from shoal_worker.elastic.session.session import Session
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("existing_objects_kept")


def train(strategy: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    options = {"example_inputs": (torch.ones(2, 4),)} if strategy in ("tensor", "hybrid") else {}
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy, **options
    )
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.zeros(8, 4))
    for x, y in shoal.ElasticDataLoader(data, global_batch_size=4):
        model.train_step(x, y, functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()


def sessions() -> int:
    gc.collect()
    return sum(type(each) is Session for each in gc.get_objects())


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tensor", "hybrid"])
def test_sessions_of_earlier_launches_are_released(strategy: str) -> None:
    before = sessions()
    for _ in range(3):
        shoal.launch(lambda: train(strategy), world_size=2)
    assert sessions() <= before + 2  # those of the last launch, which its threads may still hold
