"""A model whose forward pass calls the model itself, as the `training_step` of a LightningModule
does: its parameters are gathered once per pass."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import shoal
import torch
from torch import nn
from torch.utils.data import TensorDataset

SAMPLES, BATCH, PART = 20, 6, 2
"""Number of samples in total, per step and per micro-batch. A step has three micro-batches. With
two ranks, one has one micro-batch fewer and takes part in the other's last pass without samples."""


class Calling(nn.Module):
    """A model that returns predictions. When called with targets, it calls itself for the
    predictions and returns their loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        return self.layers(x) if y is None else nn.functional.mse_loss(self(x), y)


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def train(strategy: str) -> dict[str, torch.Tensor]:
    net = Calling()
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), strategy=strategy
    )
    loader = shoal.ElasticDataLoader(
        data(), global_batch_size=BATCH, micro_batch_size=PART, shuffle=False
    )
    for _ in loader.epochs(2):
        for step in loader.steps():
            for x, y in step:
                model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return state


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_ranks_with_fewer_micro_batches_take_part_in_nested_passes(strategy: str) -> None:
    net = Calling()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    x, y = data().tensors
    for _ in range(2):
        for begin in range(0, SAMPLES, BATCH):
            optimizer.zero_grad()
            net(x[begin : begin + BATCH], y[begin : begin + BATCH]).backward()
            optimizer.step()
    for state in shoal.launch(functools.partial(train, strategy), world_size=2):
        torch.testing.assert_close(state, net.state_dict(), rtol=0, atol=1e-12)
