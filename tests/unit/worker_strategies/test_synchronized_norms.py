"""SyncBatchNorm normalizes over the samples of all ranks: several ranks train the same model as one
process with BatchNorm."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import shoal
import torch
from shoal_worker.strategies import registry
from torch import nn
from torch.utils.data import TensorDataset

from tests.unit.worker_strategies.alike import assert_alike

SAMPLES, BATCH, EPOCHS = 26, 7, 2
"""The last batch of an epoch has 5 samples. With three ranks, one has fewer samples than the
others. With seven, two have none and use a placeholder."""
SYNCHRONIZED = ["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"]


def network(*, synchronized: bool, momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    images = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU(), nn.Flatten())
    net = nn.Sequential(*images, nn.Linear(16, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    return nn.SyncBatchNorm.convert_sync_batchnorm(net) if synchronized else net


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = 3 + torch.randn(SAMPLES, 2, 4, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (SAMPLES,), generator=generator))


def loss_of(
    output: torch.Tensor, targets: torch.Tensor, *, reduction: str = "mean"
) -> torch.Tensor:
    return nn.functional.cross_entropy(output, targets, reduction=reduction)


def trained_alone(
    *, reduction: str = "mean", momentum: float | None = 0.1
) -> dict[str, torch.Tensor]:
    net = network(synchronized=False, momentum=momentum)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    x, y = data().tensors
    for _ in range(EPOCHS):
        for begin in range(0, SAMPLES, BATCH):
            optimizer.zero_grad()
            loss_of(
                net(x[begin : begin + BATCH]), y[begin : begin + BATCH], reduction=reduction
            ).backward()
            optimizer.step()
    return net.state_dict()


def train(
    *, reduction: str = "mean", momentum: float | None = 0.1, **options: Any
) -> dict[str, torch.Tensor]:
    net = network(synchronized=True, momentum=momentum)
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
        loss_reduction=reduction,
        **options,
    )
    loader = shoal.ElasticDataLoader(data(), global_batch_size=BATCH, shuffle=False)
    for _ in loader.epochs(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model(x), y, reduction=reduction).backward()
            assert optimizer.step()
    whole: dict[str, torch.Tensor] = model.full_state_dict()
    return whole


@pytest.mark.parametrize("strategy", SYNCHRONIZED)
def test_two_ranks_train_as_one_process_does(strategy: str) -> None:
    expected = trained_alone()
    for found in shoal.launch(functools.partial(train, strategy=strategy), world_size=2):
        assert_alike(found, expected)


@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum"}, {"momentum": None}, {"strategy": "zero3"}], ids=str
)
def test_ranks_with_few_or_no_samples_are_weighted_by_their_number(
    options: dict[str, Any],
) -> None:
    strategy = {"strategy": "ddp"} | options
    expected = trained_alone(
        **{name: value for name, value in options.items() if name != "strategy"}
    )
    for found in shoal.launch(functools.partial(train, **strategy), world_size=6):
        assert_alike(found, expected)


@pytest.mark.parametrize("strategy", sorted({*registry.names()} - {*SYNCHRONIZED}))
def test_other_strategies_refuse_it_and_name_those_that_accept_it(strategy: str) -> None:
    def rank() -> None:
        net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.SyncBatchNorm(4)), nn.Linear(4, 2))
        with pytest.raises(
            shoal.ConfigurationError,
            match=r"1\.0 is a SyncBatchNorm.*use ddp, zero1, .*or use BatchNorm",
        ):
            shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy)

    shoal.launch(rank, world_size=1)


def first_pass(net: nn.Module, samples: TensorDataset, batch: int, **options: Any) -> None:
    model, _ = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    loader = shoal.ElasticDataLoader(samples, global_batch_size=batch, **options)
    x = next(iter(next(iter(loader.steps())) if options else loader))[0]
    model(x)


def test_micro_batches_are_refused() -> None:
    with pytest.raises(
        shoal.ConfigurationError,
        match=r"Leave out micro_batch_size= \(in a Trainer, the accumulation of gradients\), or",
    ):
        shoal.launch(
            lambda: first_pass(network(synchronized=True), data(), BATCH, micro_batch_size=2),
            world_size=1,
        )


def test_single_value_per_channel_over_all_ranks_is_refused_as_by_torch() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4))
    with pytest.raises(ValueError, match="more than 1 value per channel over all ranks"):
        shoal.launch(
            lambda: first_pass(copy.deepcopy(net), TensorDataset(torch.randn(2, 3)), 1),
            world_size=2,
        )


def test_copies_and_evaluation_need_no_other_rank() -> None:
    def rank() -> None:
        net = network(synchronized=True)
        model, _ = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        x = data().tensors[0]
        if shoal.rank() == 0:  # rank 1 does nothing
            copied = copy.deepcopy(net)
            copied.train()
            copied(x)
            model.eval()
            assert torch.equal(model(x), net(x))
            again = pickle.loads(pickle.dumps(net))
            again.train()
            again(x)
            torch.testing.assert_close(
                again.state_dict()["1.running_mean"], copied.state_dict()["1.running_mean"]
            )

    shoal.launch(rank, world_size=2)
