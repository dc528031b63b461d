"""A run that stops within an epoch resumes there, no matter where it saves, or warns that it will
not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import shoal
import torch
from torch import nn

SAMPLES = 101


class Numbered(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index)]), index


def train(
    directory: Path, batch: int, stop_at: int | None, *, loop: str, save: str
) -> list[tuple[int, int]]:
    """Trains up to step `stop_at`, saves, and returns the (epoch, sample) pairs that this rank
    trained on."""
    torch.manual_seed(0)
    net = nn.Linear(1, 1)
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 1e-6))
    loader = shoal.ElasticDataLoader(Numbered(), global_batch_size=batch, seed=3)
    shoal.resume(directory)
    seen, over = [], False
    for epoch in loader.epochs(2) if loop == "epochs" else range(2):
        for values, indices in loader:
            model(values).square().mean().backward()
            if optimizer.step():
                seen += [(epoch, index) for index in indices.tolist()]
            optimizer.zero_grad()
            if loader.global_step == stop_at:
                over = True
                break
        if over and save == "in the epoch":
            shoal.save_checkpoint(directory)
        if over:
            break
    if save == "behind":
        shoal.save_checkpoint(directory)
    return seen


@pytest.mark.parametrize(
    "stops", [(4, 9, 17, None), (11, 16, None)], ids=["within epochs", "between epochs as well"]
)
def test_script_that_breaks_out_of_its_loops_and_saves_afterwards_resumes_within_the_epoch(
    stops: tuple[int | None, ...], tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    for (world_size, batch), stop_at in zip(
        [(2, 10), (3, 7), (1, 7), (2, 12)], stops, strict=False
    ):
        for part in shoal.launch(
            lambda b=batch, s=stop_at: train(tmp_path, b, s, loop="epochs", save="behind"),
            world_size=world_size,
        ):
            seen += part
    assert sorted(set(seen)) == [(epoch, index) for epoch in range(2) for index in range(SAMPLES)]


@pytest.mark.parametrize(("loop", "save"), [("epochs", "in the epoch"), ("range", "behind")])
def test_a_save_that_gives_up_the_rest_of_an_epoch_is_warned_of_once(
    loop: str, save: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        shoal.launch(lambda: train(tmp_path, 10, 4, loop=loop, save=save), world_size=1)
    warned = [
        record.getMessage() for record in caplog.records if "was left early" in record.getMessage()
    ]
    assert len(warned) == 1
    assert "loader 'loader' was left early, in epoch 0 at step 4" in warned[0]


def test_a_save_inside_the_loop_or_at_the_end_of_an_epoch_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        shoal.launch(lambda: train(tmp_path, 10, None, loop="range", save="behind"), world_size=1)
    assert "left early" not in caplog.text
