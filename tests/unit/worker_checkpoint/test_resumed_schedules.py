"""A resumed run has the original schedule of learning rates, no matter where in an epoch its
checkpoint was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import shoal
import torch
from torch import nn
from torch.utils.data import TensorDataset

EPOCHS = 4
STEPS_AN_EPOCH = 2


def train(directory: Path, loop: str, stop_at: int | None) -> list[float]:
    """Trains and returns the learning rate of each step taken in this call. Stops after saving at
    step `stop_at`."""
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    raw = torch.optim.SGD(net.parameters(), 1.0)
    model, optimizer = shoal.as_distributed(net, raw)
    loader = shoal.ElasticDataLoader(
        TensorDataset(torch.ones(8, 2)), global_batch_size=8 // STEPS_AN_EPOCH
    )
    scheduler = torch.optim.lr_scheduler.StepLR(raw, 1, gamma=0.5)
    if stop_at is None:
        shoal.resume(directory)
    rates = []
    for _ in loader.epochs(EPOCHS) if loop == "epochs" else range(EPOCHS):
        for (rows,) in loader:
            optimizer.zero_grad()
            model(rows).square().mean().mul(1e-3).backward()
            optimizer.step()
            rates.append(raw.param_groups[0]["lr"])
            if loader.global_step == stop_at:
                shoal.save_checkpoint(directory)
                return rates
        scheduler.step()
    return rates


@pytest.mark.parametrize("loop", ["epochs", "range"])
@pytest.mark.parametrize("stop_at", [3, 4])
def test_resumed_run_has_the_learning_rates_of_an_uninterrupted_one(
    loop: str, stop_at: int, tmp_path: Path
) -> None:
    (before,) = shoal.launch(lambda: train(tmp_path, loop, stop_at), world_size=1)
    (after,) = shoal.launch(lambda: train(tmp_path, loop, None), world_size=1)
    assert before + after == [0.5**epoch for epoch in range(EPOCHS) for _ in range(STEPS_AN_EPOCH)]
