"""Streams that yield only fractional numbers, which fingerprints ignore. A stream that splits
itself by rank is reported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import shoal
import torch
from shoal_worker.data.streaming.fingerprints import Probe, distinguishes
from torch import nn

ITEMS = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __init__(self, splits: bool) -> None:
        self.splits = splits

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from ITEMS[shoal.rank() :: shoal.world_size()] if self.splits else ITEMS


def train(splits: bool, sharded: bool, strategy: str = "ddp") -> int:
    net = nn.Linear(3, 1)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy
    )
    if sharded:
        stream = shoal.ShardedStream(
            range(4),
            lambda shard: ITEMS[shard * 8 + (shoal.rank() if splits else 0) : (shard + 1) * 8],
        )
        loader: Any = shoal.ElasticDataLoader(stream, global_batch_size=8, micro_batch_size=2)
    else:
        loader = shoal.ElasticDataLoader(Stream(splits), global_batch_size=8)
    for _ in loader.epochs(2):
        for step in loader.steps() if sharded else ([batch] for batch in loader):
            for x in step:
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return int(loader.global_step)


@pytest.mark.parametrize("sharded", [False, True])
def test_self_splitting_stream_is_reported_in_the_first_step(
    sharded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert shoal.launch(train, False, sharded, world_size=2) == [8, 8]
    assert "differs in its numbers between ranks" not in caplog.text
    shoal.launch(train, True, sharded, world_size=2)
    assert (
        "the first item of this epoch's stream differs in its numbers between ranks" in caplog.text
    )
    assert "Do not split it by rank" in caplog.text


class Changed(torch.utils.data.IterableDataset[Any]):
    """Numbered items that an unseeded generator changes."""

    def __iter__(self) -> Iterator[Any]:
        draw = np.random.default_rng()
        yield from (
            {"number": number, "x": item * float(draw.uniform(0.5, 1.5))}
            for number, item in enumerate(ITEMS)
        )


def train_on_changed() -> int:
    net = nn.Linear(3, 1)
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    loader = shoal.ElasticDataLoader(Changed(), global_batch_size=8)
    for batch in loader:
        model(batch["x"].float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return int(loader.global_step)


def test_randomly_changed_items_are_equal_if_a_number_identifies_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert shoal.launch(train_on_changed, world_size=2) == [4, 4]
    assert "differs in its numbers between ranks" not in caplog.text


@pytest.mark.parametrize(
    ("item", "tells"),
    [
        ([1.5, torch.ones(3)], False),
        ({"__time__": 1, "x": 0.5}, False),
        ({"__key__": "a", "x": 0.5}, True),
        ((torch.ones(3), 2), True),
        (torch.tensor([1, 2]), True),
        (np.zeros(0, dtype=np.int64), False),
    ],
)
def test_items_with_identifying_values_are_distinguished(item: Any, tells: bool) -> None:
    assert distinguishes(item) is tells


def test_nothing_is_compared_if_ranks_step_independently() -> None:
    assert shoal.launch(train, False, False, "local_sgd", world_size=2) == [8, 8]


def summed(*items: Any) -> list[float]:
    return [sum(each) for each in zip(*map(Probe.of, items), strict=True)]


def test_rounding_is_not_a_difference_and_other_changes_are() -> None:
    item = {"x": ITEMS[0], "y": [1.5, 2], "z": float("nan")}
    assert Probe.alike(summed(item, {**item, "x": ITEMS[0].bfloat16().float()}, item))
    assert not Probe.alike(summed(item, {**item, "x": ITEMS[1]}, item))
    assert Probe.alike(summed("text", 3, None))
    assert not Probe.alike(summed(torch.zeros(3), torch.ones(3)))
    assert Probe.alike(summed(*[ITEMS * 1e6] * 1000))
