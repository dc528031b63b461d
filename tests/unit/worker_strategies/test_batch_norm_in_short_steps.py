"""Batch normalization when an epoch's last step has fewer than two samples per rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import shoal
import torch
from torch import nn


def train(strategy: str, samples: int, batch: int) -> list[int]:
    """Returns the sizes of this rank's batches, with 0 for a batch that has weight 0."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.SGD(net.parameters(), 0.01),
        strategy=strategy,
        minimum_parameter_group_size=1,
    )
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


CASES = [
    ("ddp", 34, [2, 0, 0]),
    ("ddp", 35, [3, 0, 0]),
    ("ddp", 36, [2, 2, 0]),
    ("ddp", 37, [3, 2, 0]),
    ("ddp", 38, [2, 2, 2]),
]


@pytest.mark.parametrize(
    ("strategy", "samples", "last"),
    [*CASES, *((each, 34, [2, 0, 0]) for each in ("zero1", "zero2", "zero3", "fsdp", "local_sgd"))],
)
def test_no_rank_gets_a_single_sample(strategy: str, samples: int, last: list[int]) -> None:
    sizes = shoal.launch(train, strategy, samples, 8, world_size=3)
    assert [sum(each) for each in zip(*sizes, strict=True)] == [8, 8, 8, 8, samples - 32] * 2
    assert [each[4] for each in sizes] == last


def test_full_steps_with_one_sample_for_a_rank_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(ValueError, match="more than 1 value per channel"),
    ):
        shoal.launch(train, "ddp", 12, 4, world_size=3)
    assert (
        "step 0 of epoch 0 has 4 samples for 3 ranks, so rank 1 received a batch of one. The model "
        "has batch normalization" in caplog.text
    )


class Numbers(torch.utils.data.IterableDataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randn(self.count, 4, generator=torch.Generator().manual_seed(1)))


def train_on(stream: Any, **sizes: Any) -> list[int]:
    """Returns the sizes of this rank's batches, with 0 for a batch that has weight 0."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.01))
    loader = shoal.ElasticDataLoader(stream, **sizes)
    got = []
    for step in loader.steps() if "micro_batch_size" in sizes else ([batch] for batch in loader):
        for part in step:
            model.train_step(part, None, lambda output, _: output.square().mean())
            got.append(len(part) if loader.batch_weight else 0)
        optimizer.step()
        optimizer.zero_grad()
    return got


def test_a_streams_last_step_leaves_no_rank_with_a_single_sample() -> None:
    sizes = shoal.launch(lambda: train_on(Numbers(34), global_batch_size=8), world_size=3)
    assert [each[-1] for each in sizes] == [2, 0, 0]


def test_shard_that_leaves_a_single_sample_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def shard(name: str) -> Iterator[torch.Tensor]:
        return iter(
            torch.randn({"a": 5, "b": 8}[name], 4, generator=torch.Generator().manual_seed(1))
        )

    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(ValueError, match="more than 1 value per channel"),
    ):
        shoal.launch(
            lambda: train_on(
                shoal.ShardedStream(["a", "b"], shard), global_batch_size=8, micro_batch_size=4
            ),
            world_size=2,
        )
    assert "received a batch of one. The model has batch normalization" in caplog.text
