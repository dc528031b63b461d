"""Batch normalization, and a last step with fewer than two samples for each rank."""

from __future__ import annotations

import logging

import pytest
import shoal
import torch
from torch import nn


def train(strategy: str, samples: int, batch: int) -> list[int]:
    """Sizes of the batches that this rank got and that counted."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.01), strategy=strategy, minimum_parameter_group_size=1)
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    loader = shoal.ElasticDataLoader(torch.utils.data.TensorDataset(x), global_batch_size=batch)
    sizes = []
    for _ in loader.epochs(2):
        for (part,) in loader:
            model(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sizes.append(len(part) if loader.batch_weight else 0)
    return sizes


CASES = [("ddp", 34, [2, 0, 0]), ("ddp", 35, [3, 0, 0]), ("ddp", 36, [2, 2, 0]), ("ddp", 37, [3, 2, 0]), ("ddp", 38, [2, 2, 2])]


@pytest.mark.parametrize(
    ("strategy", "samples", "last"), [*CASES, *((each, 34, [2, 0, 0]) for each in ("zero1", "zero2", "zero3", "fsdp", "local_sgd"))]
)
def test_no_rank_gets_a_single_sample(strategy: str, samples: int, last: list[int]) -> None:
    sizes = shoal.launch(train, strategy, samples, 8, world_size=3)
    assert [sum(each) for each in zip(*sizes, strict=True)] == [8, 8, 8, 8, samples - 32] * 2
    assert [each[4] for each in sizes] == last


def test_whole_steps_with_one_sample_for_a_rank_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="more than 1 value per channel"):
        shoal.launch(train, "ddp", 12, 4, world_size=3)
    assert "step 0 of epoch 0 has 4 samples for 3 ranks, so rank 1 gets one. The model has batch normalization" in caplog.text
