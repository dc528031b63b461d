"""Ranks that issue different collectives in a pass: some differences are refused, others are
allowed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import shoal
import torch
from shoal_common.errors import PreconditionError
from shoal_worker.sharding.collectives import IssuedCollectives
from torch import nn

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(6, 6), nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor, *, shifted: bool) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        return y + self.shift if shifted else y


class Net(nn.Module):
    def __init__(self, order: Sequence[int], *, shifted: bool) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList(Block() for _ in range(3))
        self.order, self.shifted = order, shifted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index in self.order:
            x = self.blocks[index](x, shifted=self.shifted)
        return x


def train(
    orders: Sequence[Sequence[int]], *, shifted: Sequence[bool], strategy: str
) -> dict[str, torch.Tensor]:
    """Trains one rank. `orders` and `shifted` are given by rank."""
    rank = shoal.rank()
    torch.manual_seed(0)
    net = Net(orders[rank], shifted=shifted[rank]).double()
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy, shard_modules=[Block]
    )
    for (x,) in shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(X), global_batch_size=8, shuffle=False
    ):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict()


def test_ranks_that_visit_blocks_in_different_orders_are_reported() -> None:
    with pytest.raises(PreconditionError, match="all blocks in the same order") as caught:
        shoal.launch(
            lambda: train([(0, 1, 2), (1, 0, 2)], shifted=[True, True], strategy="zero3"),
            world_size=2,
        )
    assert caught.value.reason == "RANKS_DIVERGED"


def test_parameter_of_a_block_may_be_used_by_some_ranks_only() -> None:
    torch.manual_seed(0)
    net = Net((0, 1, 2), shifted=True).double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for start in (0, 8):
        for net.shifted, part in ((True, X[start : start + 4]), (False, X[start + 4 : start + 8])):
            (net(part).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in shoal.launch(
        lambda: train([(0, 1, 2)] * 2, shifted=[True, False], strategy="fsdp"), world_size=2
    ):
        for name, value in net.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12, msg=name)


def issued(step: int, *collectives: tuple[str, int]) -> bytes:
    log = IssuedCollectives()
    log.begin(step)
    for kind, unit in collectives:
        log.add(kind, unit)
    return log.encode()


def test_ranks_may_have_reached_different_points_of_one_order_after_a_failure() -> None:
    first, second = ("gather", 0), ("gather", 1)
    IssuedCollectives.compare(
        [issued(3, first, second), issued(3, first), issued(3), b"", issued(4, second)], "zero3"
    )
    with pytest.raises(PreconditionError, match="all blocks in the same order"):
        IssuedCollectives.compare([issued(3, first, second), issued(3, second)], "zero3")
