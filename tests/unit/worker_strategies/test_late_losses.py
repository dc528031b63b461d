"""`train_step` reads a loss from the device only when the step is closed, after the backward pass
has been queued."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import shoal
import torch
from shoal_worker.elastic.contract.reported_loss import MeanLoss, read_later
from shoal_worker.replicated import engine as replicated
from shoal_worker.replicated import local_sgd
from torch import nn


class Asked:
    """A loss that records whether its gradient was already computed when its value was read."""

    def __init__(self, loss: torch.Tensor, came: list[bool]) -> None:
        self.loss, self.came, self.gradients = float(loss.detach()), came, 0
        loss.register_hook(self._count)

    def _count(self, _: torch.Tensor) -> None:
        self.gradients += 1

    def __float__(self) -> float:
        self.came.append(self.gradients > 0)
        return self.loss


def train(strategy: str, micro_batch_size: int | None) -> list[float]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy
    )
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    losses = []
    if micro_batch_size is None:
        for batch in shoal.ElasticDataLoader(dataset, global_batch_size=8, shuffle=False):
            losses.append(float(model.train_step(*batch, nn.functional.mse_loss)))
            optimizer.step()
    else:
        for step in shoal.ElasticDataLoader(
            dataset, global_batch_size=8, micro_batch_size=micro_batch_size, shuffle=False
        ).steps():
            losses += [float(model.train_step(*batch, nn.functional.mse_loss)) for batch in step]
            optimizer.step()
    return losses


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("strategy", ["ddp", "local_sgd"])
def test_loss_is_not_awaited_before_its_backward_pass(
    strategy: str, micro_batch_size: int | None
) -> None:
    expected = shoal.launch(train, strategy, micro_batch_size, world_size=2)
    came: list[bool] = []

    def later(loss: torch.Tensor) -> Any:
        return Asked(loss, came)

    with (
        mock.patch.object(replicated, "read_later", later),
        mock.patch.object(local_sgd, "read_later", later),
    ):
        assert shoal.launch(train, strategy, micro_batch_size, world_size=2) == expected
    assert came
    assert all(came)


def test_mean_omits_values_of_weight_zero_and_is_read_lazily() -> None:
    mean, asked = MeanLoss(), []

    class Loss:
        def __init__(self, value: float) -> None:
            self.value = value

        def __float__(self) -> float:
            asked.append(self.value)
            return self.value

    assert float(mean) == 0.0
    for value, weight in ((1.0, 1.0), (float("nan"), 0.0), (4.0, 2.0)):
        mean.add(Loss(value), weight)
    assert not asked
    assert float(mean) == 3.0


def test_a_loss_on_the_host_is_a_number_at_once() -> None:
    assert read_later(torch.tensor(2.5, requires_grad=True)) == 2.5
