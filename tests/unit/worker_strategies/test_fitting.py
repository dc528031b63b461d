"""`optimizer.optimize(data)` trains a model in one call, with the same result under every strategy
and number of ranks."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from torch import nn

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = X @ torch.arange(6.0, dtype=torch.float64).unsqueeze(1)
TRAINING, VALIDATION = (X[:40], Y[:40]), (X[40:], Y[40:])


def fit(
    strategy: str = "ddp", *, directory: Path | None = None, lr: float = 0.3, **options: Any
) -> tuple[shoal.OptimizationResult, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    stepper = torch.optim.SGD(net.parameters(), lr, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(stepper, 0.97)
    model, optimizer = shoal.as_distributed(net, stepper, strategy=strategy)
    if directory is not None:
        shoal.resume(directory)
    settings = {
        "training": TRAINING,
        "loss_fn": nn.functional.mse_loss,
        "epochs": 4,
        "global_batch_size": 16,
        "max_norm": 1.0,
    }
    data = shoal.OptimizationInputData(
        **settings | {"validation": VALIDATION, "scheduler": scheduler} | options
    )
    result = optimizer.optimize(data)
    return result, {name: value.clone() for name, value in model.full_state_dict().items()}


@pytest.fixture(scope="module")
def alone() -> tuple[shoal.OptimizationResult, Any]:
    """Result of a fit in a world of one. The parity matrix shows that such training equals plain
    torch's."""
    return shoal.launch(fit, world_size=1)[0]


def assert_alike(found: shoal.OptimizationResult, expected: shoal.OptimizationResult) -> None:
    assert (found.best_epoch, found.stopped_early, found.steps, found.samples) == (
        expected.best_epoch,
        expected.stopped_early,
        expected.steps,
        expected.samples,
    )
    for mine, theirs in zip(found.history, expected.history, strict=True):
        assert (mine.epoch, mine.improved) == (theirs.epoch, theirs.improved)
        assert math.isclose(mine.metric, theirs.metric, rel_tol=1e-9)
        assert math.isclose(mine.training_loss, theirs.training_loss, rel_tol=1e-9)


def test_fit_reports_its_results(alone: tuple[shoal.OptimizationResult, Any]) -> None:
    result, _ = alone
    assert result.steps == 4 * 3
    assert result.samples == 4 * 40
    assert [record.epoch for record in result.history] == [0, 1, 2, 3]
    assert not result.stopped_early
    assert result.best_metric == min(record.metric for record in result.history)
    assert result.history[3].training_loss < result.history[0].training_loss


@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_ranks_fit_like_one_process(
    alone: tuple[shoal.OptimizationResult, Any], strategy: str, micro: int | None
) -> None:
    for result, state in shoal.launch(lambda: fit(strategy, micro_batch_size=micro), world_size=3):
        assert_alike(result, alone[0])
        for name, value in alone[1].items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)


def test_more_ranks_than_samples_in_a_step_fit_like_one_process(
    alone: tuple[shoal.OptimizationResult, Any],
) -> None:
    expected, _ = shoal.launch(lambda: fit(global_batch_size=3, epochs=1), world_size=1)[0]
    for result, _ in shoal.launch(lambda: fit(global_batch_size=3, epochs=1), world_size=4):
        assert_alike(result, expected)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_fit_stops_when_the_metric_does_not_improve(strategy: str) -> None:
    for result, _ in shoal.launch(
        lambda: fit(strategy, lr=0.0, epochs=50, patience=3), world_size=2
    ):
        assert result.stopped_early
        assert result.best_epoch == 0
        assert len(result.history) == 4  # the first epoch has the best metric


def test_any_metric_may_be_used_and_may_have_to_increase() -> None:
    def negative(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return -nn.functional.mse_loss(output, targets)

    (result, _), _ = shoal.launch(lambda: fit(metric_fn=negative, mode="max"), world_size=2)
    (plain, _), _ = shoal.launch(fit, world_size=2)
    assert [-record.metric for record in result.history] == [
        record.metric for record in plain.history
    ]
    assert result.best_epoch == plain.best_epoch


def test_without_validation_the_training_loss_decides() -> None:
    for result, _ in shoal.launch(
        lambda: fit("local_sgd", validation=None, epochs=2), world_size=2
    ):
        assert [record.metric for record in result.history] == [
            record.training_loss for record in result.history
        ]


def test_fit_resumes_from_a_checkpoint_with_all_its_results(tmp_path: Path) -> None:
    def save(_: shoal.EpochRecord) -> None:
        shoal.save_checkpoint(tmp_path)

    whole, *_ = shoal.launch(fit, world_size=2)
    shoal.launch(lambda: fit("zero2", epochs=2, on_epoch=save), world_size=2)
    for result, state in shoal.launch(lambda: fit("fsdp", directory=tmp_path), world_size=3):
        assert_alike(result, whole[0])
        for name, value in whole[1].items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)


class Pairs(torch.utils.data.Dataset[Any]):
    """A dataset whose targets are dicts with one entry, regardless of the batch size."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> Any:
        return self._x[index], {"sum": self._y[index]}


@pytest.mark.parametrize("micro", [None, 4])
def test_samples_are_counted_instead_of_entries_of_their_targets(
    alone: tuple[shoal.OptimizationResult, Any], micro: int | None
) -> None:
    options = {
        "training": Pairs(*TRAINING),
        "validation": Pairs(*VALIDATION),
        "micro_batch_size": micro,
    }

    def loss(output: torch.Tensor, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(output, targets["sum"])

    for result, _ in shoal.launch(lambda: fit(loss_fn=loss, **options), world_size=2):
        assert_alike(result, alone[0])


def test_fit_can_be_called_again() -> None:
    def twice() -> list[int | None]:
        net = nn.Linear(6, 1).double()
        _, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.01))
        data = shoal.OptimizationInputData(
            training=TRAINING, loss_fn=nn.functional.mse_loss, epochs=2, global_batch_size=20
        )
        return [optimizer.optimize(copy.copy(data)).steps for _ in range(2)]

    assert shoal.launch(twice, world_size=2) == [[4, 4]] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"patience": 0}, "patience=0"),
        ({"min_delta": -1.0}, "min_delta=-1.0"),
        ({"mode": "up"}, "mode='up'"),
        ({"max_norm": 0.0}, "max_norm=0.0"),
        ({"metric_fn": nn.functional.mse_loss}, "pass validation="),
        ({"validation": VALIDATION, "loss_fn": None}, "pass at least one of them"),
        (
            {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(
                    torch.optim.SGD([nn.Parameter(torch.ones(1))])
                )
            },
            "on_epoch=",
        ),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    settings = {
        "training": TRAINING,
        "loss_fn": nn.functional.mse_loss,
        "epochs": 1,
        "global_batch_size": 4,
    }
    with pytest.raises(shoal.ConfigurationError, match=message):
        shoal.OptimizationInputData(**settings | options)


def test_summed_losses_are_refused() -> None:
    def body() -> None:
        net = nn.Linear(4, 1)
        _, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.01), loss_reduction="sum"
        )
        optimizer.optimize(
            shoal.OptimizationInputData(
                training=TRAINING, loss_fn=nn.functional.mse_loss, epochs=1, global_batch_size=4
            )
        )

    with pytest.raises(shoal.ConfigurationError, match="reports mean losses"):
        shoal.launch(body, world_size=1)


def test_tensors_of_different_lengths_are_refused() -> None:
    with pytest.raises(shoal.ConfigurationError, match=r"\[40, 64\] samples"):
        shoal.launch(lambda: fit(training=(X[:40], Y)), world_size=1)


def test_fit_of_n_steps_ends_within_an_epoch_and_records_it(
    alone: tuple[shoal.OptimizationResult, Any],
) -> None:
    (found, _), *_ = shoal.launch(functools.partial(fit, epochs=None, max_steps=5), world_size=2)
    assert (found.steps, found.samples) == (5, 40 + 2 * 16)  # an epoch has 3 steps
    assert [record.epoch for record in found.history] == [0, 1]
    assert math.isclose(found.history[0].metric, alone[0].history[0].metric, rel_tol=1e-9)
    assert found.history[1].metric != alone[0].history[1].metric
    assert not found.stopped_early


@pytest.mark.parametrize("lengths", [{"epochs": None}, {"max_steps": 0}, {"epochs": 0}])
def test_a_fit_without_a_length_is_refused(lengths: dict[str, Any]) -> None:
    with pytest.raises(shoal.ConfigurationError, match=r"epochs=|max_steps="):
        shoal.OptimizationInputData(
            **{"training": TRAINING, "epochs": 4, "global_batch_size": 16} | lengths
        )
