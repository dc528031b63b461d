"""Early stopping counts separately for each metric and each optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from torch import nn


def optimizers(number: int) -> tuple[shoal.ShardedOptimizer, ...]:
    nets = [nn.Linear(2, 1) for _ in range(number)]
    made = tuple(torch.optim.SGD(net.parameters(), 0.1) for net in nets)
    _, distributed = (
        shoal.as_distributed(tuple(nets), made)
        if number > 1
        else shoal.as_distributed(nets[0], made[0])
    )
    return distributed if number > 1 else (distributed,)


def test_two_metrics_count_by_their_modes_and_names() -> None:
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


def test_two_optimizers_count_by_themselves() -> None:
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
        match=r'called in two places of the script.*should_early_stop\(loss, name="loss"\)',
    ):
        shoal.launch(rank, world_size=1)


def test_counts_of_each_metric_go_on_after_a_resume(tmp_path: Path) -> None:
    def rank(values: list[float]) -> list[bool]:
        (optimizer,) = optimizers(1)
        shoal.resume(tmp_path)
        stops = [optimizer.should_early_stop(value, patience=3, name="loss") for value in values]
        shoal.save_checkpoint(tmp_path)
        return stops

    assert shoal.launch(lambda: rank([1.0, 2.0, 3.0]), world_size=1) == [[False] * 3]
    assert shoal.launch(lambda: rank([4.0]), world_size=1) == [[True]]
