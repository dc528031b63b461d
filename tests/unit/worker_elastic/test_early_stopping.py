"""Early stopping counts separately for each metric and each optimizer."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.utils.data import TensorDataset


def optimizers(number: int) -> tuple[shoal.ShardedOptimizer, ...]:
    nets = [nn.Linear(2, 1) for _ in range(number)]
    made = tuple(torch.optim.SGD(net.parameters(), 0.1) for net in nets)
    _, distributed = (
        shoal.as_distributed(tuple(nets), made)
        if number > 1
        else shoal.as_distributed(nets[0], made[0])
    )
    return distributed if number > 1 else (distributed,)


def test_two_metrics_count_separately_by_mode_and_name() -> None:
    def rank() -> list[list[bool]]:
        (optimizer,) = optimizers(1)
        answers = []
        for loss, accuracy, norm in ((1.0, 0.1, 3.0), (2.0, 0.2, 2.0), (3.0, 0.3, 1.0)):
            answers.append(
                [
                    optimizer.should_early_stop(loss, patience=2),
                    optimizer.should_early_stop(accuracy, mode="max", patience=2),
                    optimizer.should_early_stop(norm, patience=2, name="norm"),
                ]
            )
        return answers

    assert (
        shoal.launch(rank, world_size=2) == [[[False] * 3, [False] * 3, [True, False, False]]] * 2
    )


def test_two_optimizers_count_separately() -> None:
    def rank() -> list[bool]:
        one, other = optimizers(2)
        return [
            one.should_early_stop(value, patience=2) or other.should_early_stop(-value, patience=2)
            for value in (1.0, 2.0, 3.0)
        ]

    assert shoal.launch(rank, world_size=1) == [[False, False, True]]


def test_two_metrics_without_names_are_refused() -> None:
    def rank() -> bool:
        (optimizer,) = optimizers(1)
        return optimizer.should_early_stop(1.0) or optimizer.should_early_stop(2.0)

    with pytest.raises(
        ConfigurationError,
        match=r'called at two places in the script.*should_early_stop\(loss, name="loss"\)',
    ):
        shoal.launch(rank, world_size=1)


def test_counts_of_each_metric_continue_after_a_resume(tmp_path: Path) -> None:
    def rank(values: list[float]) -> list[bool]:
        (optimizer,) = optimizers(1)
        shoal.resume(tmp_path)
        stops = [optimizer.should_early_stop(value, patience=3, name="loss") for value in values]
        shoal.save_checkpoint(tmp_path)
        return stops

    assert shoal.launch(lambda: rank([1.0, 2.0, 3.0]), world_size=1) == [[False] * 3]
    assert shoal.launch(lambda: rank([4.0]), world_size=1) == [[True]]


def _fit(
    directory: Path,
    losses: Sequence[float],
    *,
    saves: str,
    patience: int = 2,
    both: bool = False,
) -> tuple[list[int], int]:
    """Trains up to ten epochs of four steps, with the given loss after each epoch. Returns the
    number of trained epochs, and the run's number of steps."""
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    rows = torch.randn(16, 2)
    loader = shoal.ElasticDataLoader(TensorDataset(rows), global_batch_size=4)
    shoal.resume(directory)
    epochs = []
    for epoch in loader.epochs(10):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        epochs.append(epoch)
        if saves == "before the question":
            shoal.save_checkpoint(directory)
        stop = optimizer.should_early_stop(losses[epoch], patience=patience)
        if both:
            stop |= optimizer.should_early_stop(-epoch, patience=patience, name="other")
        if saves == "before the break":
            shoal.save_checkpoint(directory)
        if stop:
            break
    if saves == "after the loop":
        shoal.save_checkpoint(directory)
    return epochs, loader.global_step


@pytest.mark.parametrize("saves", ["before the question", "before the break", "after the loop"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_run_stopped_early_trains_no_epoch_when_resumed(
    tmp_path: Path, saves: str, ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def rank() -> tuple[list[int], int]:
        return _fit(tmp_path, [3.0, 2.0, 4.0, 4.0, 1.0], saves=saves)

    assert shoal.launch(rank, world_size=ranks) == [([0, 1, 2, 3], 16)] * ranks
    assert "resumed" not in capfd.readouterr().err
    assert shoal.launch(rank, world_size=ranks) == [([], 16)] * ranks
    assert capfd.readouterr().err.count("after which should_early_stop had ended training") == 1


def test_run_resumed_without_that_checkpoint_trains_on_with_more_patience(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def rank(patience: int) -> tuple[list[int], int]:
        losses = [3.0, 2.0, 4.0, 4.0, 1.0, *[5.0] * 5]
        return _fit(tmp_path, losses, saves="before the question", patience=patience)

    shoal.launch(lambda: rank(2), world_size=1)
    shutil.rmtree(tmp_path / "step-16")
    assert shoal.launch(lambda: rank(3), world_size=1) == [([3, 4, 5, 6, 7], 32)]
    resumed = f"shoal: resumed from {tmp_path / 'step-12'}\n"
    assert resumed in capfd.readouterr().err


def test_loop_left_while_a_metric_still_improves_continues_when_resumed(
    tmp_path: Path,
) -> None:
    def rank() -> tuple[list[int], int]:
        return _fit(tmp_path, [1.0, 2.0, 3.0, 4.0], saves="after the loop", both=True)

    assert shoal.launch(rank, world_size=1) == [([0, 1, 2], 12)]
    assert shoal.launch(rank, world_size=1) == [([3], 16)]
