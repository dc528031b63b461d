"""Checkpoints are written to the directory that the script named, even if it changes its working
directory later. The umask decides who may read them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from torch import nn

STRATEGIES = ["ddp", "zero3", "fsdp", "tensor"]


@pytest.fixture
def umask_022() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def train(strategy: str) -> shoal.ShardedModel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model, optimizer = shoal.as_distributed(
        net, torch.optim.AdamW(net.parameters(), 1e-3), strategy=strategy
    )
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(torch.ones(8, 64)), global_batch_size=4
    )
    for (x,) in loader:
        model.train_step(x, None, lambda output, _: output.square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    "strategy", [*STRATEGIES, "zero1", "zero2", "hsdp", "local_sgd", "pipeline", "hybrid"]
)
def test_relative_directory_is_resolved_at_the_call(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)

    def rank() -> None:
        train(strategy)
        shoal.save_checkpoint("checkpoints")
        os.chdir(elsewhere)
        shoal.shutdown()

    shoal.launch(rank, world_size=1)
    assert (here / "checkpoints" / "step-2" / "checkpoint.json").exists()
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("call", ["save_checkpoint", "resume"])
def test_ranks_that_name_different_directories_are_reported(
    strategy: str, call: str, tmp_path: Path
) -> None:
    def rank() -> None:
        train(strategy)
        getattr(shoal, call)(tmp_path / f"of-{shoal.rank()}")

    with pytest.raises(
        ConfigurationError,
        match=rf"{call}: rank 0 passed the directory .*of-0', but rank 1 passed .*of-1'; pass the "
        r"same",
    ):
        shoal.launch(rank, world_size=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_save_a_model_to_different_paths_are_reported(
    strategy: str, tmp_path: Path
) -> None:
    def rank() -> None:
        model = train(strategy)
        with pytest.raises(
            ConfigurationError,
            match=r"save_model: rank 0 passed the path .*of-0', but rank 1 passed .*of-1'; pass "
            "the same",
        ):
            model.save_model(tmp_path / f"of-{shoal.rank()}")

    shoal.launch(rank, world_size=2)
    assert list(tmp_path.iterdir()) == []


def test_relative_directory_of_tensorboard_is_resolved_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)

    def rank() -> None:
        shoal.track(shoal.TensorBoard("runs"))
        os.chdir(elsewhere)
        train("ddp")  # the first step opens the file
        shoal.shutdown()

    shoal.launch(rank, world_size=1)
    assert list(here.glob("runs/events*"))
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_umask_determines_the_permissions_of_a_checkpoint(
    strategy: str, tmp_path: Path, umask_022: None
) -> None:
    def rank() -> None:
        train(strategy)
        shoal.save_checkpoint(tmp_path)
        shoal.shutdown()

    shoal.launch(rank, world_size=2)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {
        path.name: "0o644" for path in files
    }
