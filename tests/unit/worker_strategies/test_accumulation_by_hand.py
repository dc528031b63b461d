"""A loop that accumulates gradients over several batches before one optimizer.step() fails with an
error that recommends micro-batches."""

from __future__ import annotations

import pytest
import shoal
import torch
from torch import nn
from torch.nn import functional as F

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp", "tensor", "local_sgd"]


def _made(strategy):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy
    )
    rows, labels = torch.randn(64, 4), torch.randint(0, 2, (64,))
    return (
        model,
        optimizer,
        shoal.ElasticDataLoader(torch.utils.data.TensorDataset(rows, labels), global_batch_size=8),
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_without_a_step_names_micro_batches(strategy):
    def rank():
        model, _, loader = _made(strategy)
        batches = iter(loader)
        rows, labels = next(batches)
        F.cross_entropy(model(rows), labels).backward()
        with pytest.raises(
            shoal.PreconditionError,
            match=r"optimizer\.step\(\) was not called .* micro_batch_size= .* loader\.steps\(\)",
        ):
            next(batches)

    shoal.launch(rank, world_size=2)


# under local_sgd, a rank applies its own gradients without a sum
@pytest.mark.parametrize(
    "strategy", [strategy for strategy in STRATEGIES if strategy != "local_sgd"]
)
def test_a_backward_pass_after_the_sum_names_micro_batches(strategy):
    def rank():
        model, _, loader = _made(strategy)
        rows, labels = next(iter(loader))
        F.cross_entropy(model(rows), labels).backward()
        model.clip_grad_norm_(1.0)
        with pytest.raises(
            shoal.PreconditionError,
            match=r"already reduced.* micro_batch_size= .* loader\.steps\(\)",
        ):
            F.cross_entropy(model(rows), labels).backward()

    shoal.launch(rank, world_size=2)
