"""Streams that give nothing but numbers with a fraction, which fingerprints leave out: one that splits itself by rank is found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import shoal
import torch
from shoal_worker.data.fingerprints import Probe
from torch import nn

ITEMS = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __init__(self, splits: bool) -> None:
        self.splits = splits

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from ITEMS[shoal.rank() :: shoal.world_size()] if self.splits else ITEMS


def train(splits: bool, sharded: bool, strategy: str = "ddp") -> int:
    net = nn.Linear(3, 1)
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy)
    if sharded:
        stream = shoal.ShardedStream(range(4), lambda shard: ITEMS[shard * 8 + (shoal.rank() if splits else 0) : (shard + 1) * 8])
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
def test_one_that_splits_itself_is_found_in_the_first_step(sharded: bool) -> None:
    assert shoal.launch(train, False, sharded, world_size=2) == [8, 8]
    with pytest.raises(shoal.PreconditionError, match=r"begins this epoch with an item that has other numbers.*Do not split it by rank"):
        shoal.launch(train, True, sharded, world_size=2)


def test_where_steps_are_each_ranks_own_nothing_is_compared() -> None:
    assert shoal.launch(train, False, False, "local_sgd", world_size=2) == [8, 8]


def summed(*items: Any) -> list[float]:
    return [sum(each) for each in zip(*map(Probe.of, items), strict=True)]


def test_rounding_is_no_difference_and_other_numbers_are() -> None:
    item = {"x": ITEMS[0], "y": [1.5, 2], "z": float("nan")}
    assert Probe.alike(summed(item, {**item, "x": ITEMS[0].bfloat16().float()}, item))
    assert not Probe.alike(summed(item, {**item, "x": ITEMS[1]}, item))
    assert Probe.alike(summed("text", 3, None))
    assert not Probe.alike(summed(torch.zeros(3), torch.ones(3)))
    assert Probe.alike(summed(*[ITEMS * 1e6] * 1000))
