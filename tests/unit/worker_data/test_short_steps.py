"""In a step with fewer samples than ranks, a rank without samples gets a placeholder batch of
weight 0."""

from __future__ import annotations

import logging

import pytest
import shoal
import torch
from torch import nn

ROWS = torch.arange(13.0)[:, None]


def sums(world_size: int, **options: object) -> tuple[float, float]:
    """Returns the summed loss and the number of samples, added up over batches and ranks as in the
    guides."""

    def rank() -> tuple[float, float]:
        torch.manual_seed(0)
        net = nn.Linear(1, 1)
        model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.0))
        dataset = torch.utils.data.TensorDataset(ROWS)
        loader = shoal.ElasticDataLoader(dataset, global_batch_size=12, shuffle=False, **options)  # type: ignore[arg-type]
        total, count = torch.zeros(()), 0.0
        for _ in loader.epochs(2):
            for (x,) in loader:
                loss = model(x).square().mean()
                loss.backward()
                if optimizer.step():
                    total, count = (
                        total + loss.detach() * loader.batch_weight,
                        count + loader.batch_weight,
                    )
                optimizer.zero_grad()
        everyones = shoal.all_reduce({"total": total, "count": count})
        return everyones["total"].item(), everyones["count"]

    (first, *others) = shoal.launch(rank, world_size=world_size)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sums_by_batch_weight_match_one_process(world_size: int) -> None:
    torch.manual_seed(0)
    net = nn.Linear(1, 1)
    total, count = sums(world_size)
    assert count == 2 * len(ROWS)
    assert total == pytest.approx(2 * net(ROWS).square().sum().item())


def test_placeholder_has_no_weight_even_with_a_weight_function() -> None:
    assert sums(2, weight_fn=lambda batch: 10.0 * len(batch[0]))[1] == 2 * 10.0 * len(ROWS)


def test_a_rank_without_samples_is_advised_once_how_to_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        sums(2)
    (warned,) = [
        record.getMessage() for record in caplog.records if "batch_weight" in record.getMessage()
    ]
    assert (
        "step 1 of epoch 0 has 1 samples for 2 ranks, so rank 1 received a copy of another rank's"
        in warned
    )
