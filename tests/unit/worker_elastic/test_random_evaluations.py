"""An evaluation that draws random numbers gives the same result on any number of ranks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import shoal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return ROWS[index] + torch.randn(4)


def noisy(model: nn.Module, batch: Any) -> dict[str, float]:
    (rows,) = batch if isinstance(batch, list) else (batch,)
    noise = torch.randn_like(rows) + random.random() + np.random.rand()
    return {"sum": model(rows + noise).square().sum().item()}


def evaluations(
    kind: str, strategy: str = "ddp", deterministic: bool = False
) -> tuple[list[float], float]:
    """Returns the results of two evaluations in a row and a random number that the script draws
    afterwards."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    net = nn.Linear(4, 1)
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.SGD(net.parameters(), 0.0),
        strategy=strategy,
        deterministic=deterministic,
    )
    batches: Any = {
        "shoal's": lambda: shoal.ElasticDataLoader(
            TensorDataset(ROWS), global_batch_size=8, train=False
        ),
        "torch's": lambda: DataLoader(TensorDataset(ROWS), batch_size=8),
        "torch's, drawing": lambda: DataLoader(Noisy(), batch_size=8),
    }[kind]()
    loader = shoal.ElasticDataLoader(
        TensorDataset(ROWS[:6]), global_batch_size=6, micro_batch_size=2 if deterministic else None
    )
    for step in loader.steps() if deterministic else ([batch] for batch in loader):
        for (rows,) in step:
            model(0 * rows).mean().backward()
        assert optimizer.step()
    torch.manual_seed(0)  # in a step, each rank draws its own random numbers
    results = [shoal.evaluate(model, batches, noisy)["sum"] for _ in range(2)]
    return results, torch.rand(()).item()


@pytest.mark.usefixtures("fresh_session")
@pytest.mark.parametrize(
    ("kind", "strategy", "deterministic"),
    [
        *((kind, "ddp", False) for kind in ("shoal's", "torch's", "torch's, drawing")),
        ("shoal's", "ddp", True),
        ("torch's, drawing", "ddp", True),
        ("shoal's", "zero3", True),
        ("shoal's", "tensor", False),
    ],
)
def test_random_evaluation_is_the_same_on_any_number_of_ranks(
    kind: str, strategy: str, deterministic: bool
) -> None:
    def rank() -> tuple[list[float], float]:
        return evaluations(kind, strategy, deterministic)

    alone = rank()  # without ranks, like `python train.py`
    assert alone[0][0] != alone[0][1], "the two evaluations draw different numbers"
    for world_size in (1, 2, 3):
        assert shoal.launch(rank, world_size=world_size) == [alone] * world_size


def test_each_batch_of_an_evaluation_draws_its_own_numbers() -> None:
    def rank() -> int:
        net = nn.Linear(4, 1)
        model, _ = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        batches = shoal.ElasticDataLoader(TensorDataset(ROWS), global_batch_size=8, train=False)
        drawn: set[float] = set()

        def draw(model: nn.Module, batch: Any) -> dict[str, float]:
            drawn.add(torch.rand(()).item())
            return {"batches": 1.0}

        assert shoal.evaluate(model, batches, draw)["batches"] == 5
        return len(drawn)

    assert shoal.launch(rank, world_size=1) == [5]
