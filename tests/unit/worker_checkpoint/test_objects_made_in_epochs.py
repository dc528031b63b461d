"""Objects that a script creates again in each epoch or phase have their own state after a resume,
or are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

EPOCHS = 3
STEPS_AN_EPOCH = 4


class Training:
    """A linear model, its optimizer and a loader with four steps per epoch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        net = nn.Linear(2, 1)
        self.raw = torch.optim.SGD(net.parameters(), 1.0)
        self.model, self.optimizer = shoal.as_distributed(net, self.raw)
        self.rates: list[float] = []

    def loader(self, **options: Any) -> shoal.ElasticDataLoader:
        return shoal.ElasticDataLoader(
            TensorDataset(torch.ones(4 * STEPS_AN_EPOCH, 2)), global_batch_size=4, **options
        )

    def step(self, rows: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(rows).square().mean().mul(1e-3).backward()
        self.optimizer.step()
        self.rates.append(self.raw.param_groups[0]["lr"])


def cosine_in_each_epoch(directory: Path, stop_at: int | None) -> list[float]:
    training = Training()
    loader = training.loader()
    if stop_at is None:
        shoal.resume(directory)
    for _ in loader.epochs(EPOCHS):
        scheduler = CosineAnnealingLR(training.raw, T_max=STEPS_AN_EPOCH)
        for (rows,) in loader:
            training.step(rows)
            scheduler.step()
            if loader.global_step == stop_at:
                shoal.save_checkpoint(directory)
                return training.rates
        training.raw.param_groups[0]["lr"] = 1.0
    return training.rates


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stop_at", [2, 4, 6, 11])
def test_scheduler_created_in_each_epoch_continues_with_its_own_state(
    stop_at: int, world_size: int, tmp_path: Path
) -> None:
    whole = shoal.launch(lambda: cosine_in_each_epoch(tmp_path / "none", 10**6), world_size=1)[0]
    before = shoal.launch(lambda: cosine_in_each_epoch(tmp_path, stop_at), world_size=1)[0]
    for after in shoal.launch(lambda: cosine_in_each_epoch(tmp_path, None), world_size=world_size):
        assert before + after == pytest.approx(whole)


def made_at(step: int, make: Callable[[Training], object]) -> None:
    """Creates an object between two batches."""
    training = Training()
    loader, kept = training.loader(), []
    for _ in loader.epochs(1):
        for (rows,) in loader:
            training.step(rows)
            if loader.global_step == step:
                kept.append(make(training))


def named(scheduler: LRScheduler) -> LRScheduler:
    shoal.register_state(second_phase=scheduler)
    return scheduler


@pytest.mark.parametrize(
    "make",
    [
        lambda training: CosineAnnealingLR(training.raw, 9),
        lambda training: AveragedModel(training.model),
    ],
    ids=["cosine", "average"],
)
def test_object_created_between_two_batches_is_refused_unless_named(
    make: Callable[[Training], object],
) -> None:
    with pytest.raises(
        ConfigurationError, match=r"was created between two batches.*register_state"
    ):
        shoal.launch(lambda: made_at(2, make), world_size=1)


def test_object_created_between_two_batches_may_be_named() -> None:
    shoal.launch(
        lambda: made_at(2, lambda training: named(CosineAnnealingLR(training.raw, 9))), world_size=2
    )


def test_object_created_in_a_loop_over_torchs_own_loader_is_refused_unless_named() -> None:
    def rank() -> None:
        training = Training()
        training.step(torch.ones(4, 2))
        scheduler = CosineAnnealingLR(training.raw, 9)
        training.step(torch.ones(4, 2))
        scheduler.step()

    with pytest.raises(ConfigurationError, match="was created between two batches"):
        shoal.launch(rank, world_size=1)


def test_unclaimed_state_is_reported_and_not_given_to_later_objects(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save() -> None:
        training = Training()
        loader, scheduler = training.loader(name="train"), CosineAnnealingLR(training.raw, 9)
        shoal.register_state(mine=torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0))
        for (rows,) in loader:
            training.step(rows)
            scheduler.step()
            shoal.save_checkpoint(tmp_path)

    def go_on() -> tuple[int, list[float]]:
        training = Training()
        loader = training.loader(name="other")
        shoal.resume(tmp_path)
        for (rows,) in loader:
            training.step(rows)
        scheduler = CosineAnnealingLR(training.raw, 9)
        for (rows,) in loader:
            training.step(rows)
        return scheduler.last_epoch, training.rates

    shoal.launch(save, world_size=1)
    with caplog.at_level(logging.WARNING):
        ((last_epoch, _),) = shoal.launch(go_on, world_size=1)
    assert last_epoch == 0
    assert "the loaded state of shoal.scheduler.0 was dropped" in caplog.text
    assert "the loaded state of mine, the loader 'train' was not used" in caplog.text


@pytest.mark.parametrize("names", [(None, None), ("one", "two")])
def test_loader_that_the_script_has_released_is_not_trained_on_after_a_resume(
    names: tuple[str | None, ...], tmp_path: Path
) -> None:
    def rank(stop_at: int | None) -> int:
        training, steps = Training(), 0
        if stop_at is None:
            shoal.resume(tmp_path)
        for name in names:
            loader = training.loader(name=name)
            for _ in loader.epochs(1):
                for (rows,) in loader:
                    training.step(rows)
                    steps += 1
                    if steps == stop_at:
                        shoal.save_checkpoint(tmp_path)
                        return steps
            del loader
        return steps

    assert shoal.launch(lambda: rank(STEPS_AN_EPOCH + 1), world_size=1) == [STEPS_AN_EPOCH + 1]
    assert shoal.launch(lambda: rank(None), world_size=1) == [STEPS_AN_EPOCH - 1]


def test_second_loader_with_the_name_of_a_released_one_is_refused() -> None:
    def rank() -> None:
        training = Training()
        for _ in range(2):
            for (rows,) in training.loader(name="train"):
                training.step(rows)

    with pytest.raises(
        ConfigurationError, match="a training loader named 'train' already existed in this script"
    ):
        shoal.launch(rank, world_size=1)
