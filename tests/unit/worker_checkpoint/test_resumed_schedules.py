"""A resumed run has the original schedule of learning rates, no matter where in an epoch its
checkpoint was written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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


Loop = tuple[int | None, int | None]
"""Arguments of `epochs()`."""
SCHEDULES: dict[str, Callable[[Any], object]] = {
    "of a length": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "of no length": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 6),
    "none": lambda optimizer: None,
}


@pytest.mark.parametrize(
    ("saved_in", "resumed_in", "schedule", "told"),
    [
        ([(2, None)], [(3, None)], "of a length", ("epochs(2)", "epochs(3)")),
        ([(None, 3)], [(2, 5)], "of a length", ("(max_steps=3)", "(2, max_steps=5)")),
        ([(2, None)], [(3, None)], "of no length", ()),
        ([(2, None)], [(3, None)], "none", ()),
        ([(2, None)], [(2, None)], "of a length", ()),
        # a script of two loops, whose second loop the saved run had entered or not
        ([(1, None)], [(1, None), (3, None)], "of a length", ()),
        ([(1, None), (3, None)], [(1, None), (3, None)], "of a length", ()),
    ],
)
def test_a_loop_of_another_length_than_in_the_checkpoint_is_told_once(
    saved_in: Sequence[Loop],
    resumed_in: Sequence[Loop],
    schedule: str,
    told: Sequence[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(loops: Sequence[Loop]) -> None:
        net = nn.Linear(2, 1)
        model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 1e-3))
        loader = shoal.ElasticDataLoader(TensorDataset(torch.ones(8, 2)), global_batch_size=4)
        kept = SCHEDULES[schedule](optimizer)
        shoal.resume(tmp_path)
        for epochs, max_steps in loops:
            for _ in loader.epochs(epochs, max_steps=max_steps):
                for (rows,) in loader:
                    model(rows).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if loader.global_step < 6:
                    shoal.save_checkpoint(tmp_path)
        del kept

    with caplog.at_level(logging.WARNING):
        shoal.launch(run, saved_in, world_size=1)
        assert not caplog.messages
        shoal.launch(run, resumed_in, world_size=2)
    assert [all(call in said for call in told) for said in caplog.messages] == [True] * bool(told)
