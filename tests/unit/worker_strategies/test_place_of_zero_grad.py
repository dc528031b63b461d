"""`optimizer.zero_grad()` may come before the backward pass or after the step."""

from __future__ import annotations

from typing import Any

import pytest
import shoal
import torch
from torch import nn
from torch.utils.data import TensorDataset

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
STRATEGIES = [
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "fsdp",
    "hsdp",
    "tensor",
    "pipeline",
    "hybrid",
    "local_sgd",
]


def train(strategy: str, micro: int | None, place: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh())
    options: dict[str, Any] = {"sync_every": 2} if strategy == "local_sgd" else {}
    model, optimizer = shoal.as_distributed(
        net, torch.optim.Adam(net.parameters(), 0.01), strategy=strategy, **options
    )
    loader = shoal.ElasticDataLoader(TensorDataset(X), global_batch_size=8, micro_batch_size=micro)
    for step in loader.steps() if micro else ([batch] for batch in loader):
        if place == "before":
            optimizer.zero_grad()
        for (x,) in step:
            model.train_step(x, None, lambda output, _: output.square().mean())
        optimizer.step()
        if place == "after":
            optimizer.zero_grad()
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return state


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_place_of_zero_grad_does_not_change_the_result(
    strategy: str, micro: int | None
) -> None:
    before, after = (
        shoal.launch(train, strategy, micro, place, world_size=2)[0]
        for place in ("before", "after")
    )
    assert all(torch.equal(before[name], value) for name, value in after.items())
