"""Ranks that all train on the same batches of a plain DataLoader are stopped in the first steps.
Ranks that all evaluate on the same batches are warned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import shoal
import torch
from shoal_common.errors import PreconditionError
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

ROWS = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
DATASET = TensorDataset(ROWS, ROWS.sum(1, keepdim=True))


def usual() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(DATASET, batch_size=8, shuffle=True)


def sampled() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(
        DATASET, batch_size=8, sampler=DistributedSampler(DATASET, shoal.world_size(), shoal.rank())
    )


def seeded_by_rank() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(
        DATASET, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(shoal.rank())
    )


def all_at_once() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(DATASET, batch_size=64)


def train(
    make: Callable[[], DataLoader[tuple[torch.Tensor, ...]]],
    strategy: str = "ddp",
    *,
    directory: Path | None = None,
    **options: object,
) -> int:
    """Trains five epochs of at most four steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.01), strategy=strategy, **options
    )
    if directory is not None:
        shoal.resume(directory)
    loader, steps = make(), 0
    for _ in range(5):
        for number, (x, y) in enumerate(loader):
            if number == 4:
                break
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    if directory is not None:
        shoal.save_checkpoint(directory)
    return steps


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "fsdp", "local_sgd"])
def test_ranks_that_train_on_the_same_batches_of_a_dataloader_are_stopped_with_the_remedy(
    strategy: str,
) -> None:
    with pytest.raises(
        PreconditionError,
        match=r"all 2 ranks trained on the same batches.*ElasticDataLoader.*DistributedSampler",
    ) as raised:
        shoal.launch(
            lambda: train(
                usual, strategy, **({"sync_every": 2} if strategy == "local_sgd" else {})
            ),
            world_size=2,
        )
    assert raised.value.reason == "SAME_BATCHES"


@pytest.mark.parametrize("make", [sampled, seeded_by_rank, all_at_once])
def test_batches_that_differ_between_ranks_or_never_change_are_accepted(
    make: Callable[[], DataLoader[tuple[torch.Tensor, ...]]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert len(set(shoal.launch(lambda: train(make), world_size=2))) == 1
    assert "same batches" not in caplog.text


def test_ranks_of_one_replica_have_the_same_batches() -> None:
    shoal.launch(lambda: train(usual, "tensor"), world_size=2)


def test_one_rank_alone_is_not_compared() -> None:
    shoal.launch(lambda: train(usual), world_size=1)


def test_the_check_can_be_turned_off() -> None:
    shoal.launch(lambda: train(usual, consistency_check_every=0), world_size=2)


def test_a_resumed_run_is_checked_again(tmp_path: Path) -> None:
    shoal.launch(lambda: train(sampled, directory=tmp_path), world_size=2)
    with pytest.raises(PreconditionError, match="trained on the same batches"):
        shoal.launch(lambda: train(usual, directory=tmp_path), world_size=2)


def test_a_loop_that_draws_the_same_batches_without_a_dataloader_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def rank() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.01))
        for _ in range(5):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with caplog.at_level(logging.WARNING):
        shoal.launch(rank, world_size=2)
    assert "all 2 ranks trained on the same batches" in caplog.text
    assert "make a Dataset that returns them" in caplog.text
    assert "torch's DataLoader" not in caplog.text
    assert "a plain DataLoader" not in caplog.text


class Stream(IterableDataset[tuple[torch.Tensor, ...]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return iter(list(DATASET))


def test_ranks_that_all_read_one_iterable_dataset_are_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        taken = shoal.launch(
            lambda: train(lambda: DataLoader(Stream(), batch_size=8)), world_size=2
        )
    assert taken == [20, 20]
    assert "all 2 ranks trained on the same batches" in caplog.text


def train_on(dataset: TensorDataset, batch_size: int, *, sampled: bool = False) -> None:
    sampler = DistributedSampler(dataset, shoal.world_size(), shoal.rank()) if sampled else None
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.01))
    loader = DataLoader(
        dataset, batch_size=batch_size, sampler=sampler, shuffle=None if sampled else True
    )
    for _ in range(4):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("rows", "batch_size", "sampled", "warned"),
    [
        pytest.param(ROWS[:8], 8, False, True, id="one batch, shuffled"),
        pytest.param(ROWS[:8], 4, False, True, id="two batches"),
        pytest.param(ROWS[:12], 4, False, True, id="all of three batches"),
        pytest.param(torch.ones(64, 4), 4, False, False, id="constant data"),
        pytest.param(
            torch.ones(20, 4),
            4,
            True,
            True,
            id="constant data, a short last batch, sampled by rank",
        ),
    ],
)
def test_tiny_and_constant_datasets_are_accepted(
    rows: torch.Tensor,
    batch_size: int,
    sampled: bool,
    warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        shoal.launch(
            lambda: train_on(TensorDataset(rows), batch_size, sampled=sampled), world_size=2
        )
    assert ("same batches" in caplog.text) is warned


def evaluate_by_hand(how: str, strategy: str) -> None:
    """Trains three epochs and evaluates on a validation set after each in the way named by
    `how`."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.01), strategy=strategy
    )
    loader, validation = sampled(), DataLoader(DATASET, batch_size=8)
    if how == "dealt by a sampler":
        validation = sampled()
    if how == "a few samples":
        validation = DataLoader(TensorDataset(ROWS[:16], ROWS[:16]), batch_size=8)
    if how == "one batch again and again":
        validation = DataLoader(TensorDataset(torch.ones(64, 4), ROWS), batch_size=8)
    for _ in range(3):
        for x, y in loader:
            with torch.no_grad():
                model(x)  # a pass without gradients, such as that of a teacher model
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if how == "by shoal.evaluate":
            shoal.evaluate(model, validation, lambda m, batch: {"sum": m(batch[0]).sum().item()})
        elif how != "on one rank" or shoal.rank() == 0:
            model.eval()
            with torch.no_grad():
                for x, _ in validation:
                    model(x) if how != "by predict" else model.predict(x)
            model.train()


@pytest.mark.parametrize(
    ("how", "strategy"),
    [("by a loop", "ddp"), ("by a loop", "zero3"), ("by predict", "ddp"), ("by a loop", "hybrid")],
)
def test_ranks_that_all_evaluate_the_full_validation_set_are_warned_once(
    how: str, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        shoal.launch(lambda: evaluate_by_hand(how, strategy), world_size=2)
    assert caplog.text.count("all 2 ranks evaluated the model on the same batches") == 1
    assert "shoal.evaluate" in caplog.text


@pytest.mark.parametrize(
    ("how", "strategy"),
    [
        ("dealt by a sampler", "ddp"),
        ("a few samples", "ddp"),
        ("one batch again and again", "ddp"),
        ("by shoal.evaluate", "ddp"),
        ("on one rank", "ddp"),
        ("by a loop", "tensor"),
    ],
)
def test_other_evaluations_are_not_warned_of(
    how: str, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        shoal.launch(lambda: evaluate_by_hand(how, strategy), world_size=2)
    assert "on the same batches" not in caplog.text
