"""`shoal compare`: the tensors of checkpoints of any strategy, and of files with a state dict."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import shoal
import torch
from shoal.cli.app import app
from shoal_common.errors import ConfigurationError, CorruptDataError
from shoal_worker.checkpoint import comparison
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

State = dict[str, torch.Tensor]


def printed(*places: object, status: int) -> list[str]:
    """Returns the lines that `shoal compare` prints for two places."""
    result = CliRunner().invoke(app, ["compare", *map(str, places)])
    assert result.exit_code == status, result.output or result.exception
    return result.output.splitlines()


class Tied(nn.Module):
    """A network with a tied parameter, a frozen one, and one whose dtype files store as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return output


def train(strategy: str, directory: Path, frozen: str = "write", rate: float = 0.01) -> None:
    torch.manual_seed(0)
    net = Tied()
    trained = [p for p in net.parameters() if p.requires_grad]
    model, optimizer = shoal.as_distributed(
        net, torch.optim.Adam(trained, rate), strategy=strategy, deterministic=True
    )
    average = torch.optim.swa_utils.AveragedModel(model)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    for step in shoal.ElasticDataLoader(
        TensorDataset(x), global_batch_size=4, micro_batch_size=1
    ).steps():
        for (rows,) in step:
            model(rows).square().mean().backward()
        if optimizer.step():
            average.update_parameters(model)
        optimizer.zero_grad()
    shoal.save_checkpoint(directory, frozen=frozen)
    state = model.full_state_dict()
    if shoal.is_main_process():
        directory.mkdir(exist_ok=True)  # the checkpoint is written in the background
        torch.save({"model": state, "step": 2}, directory / "model.pt")
        safetensors.torch.save_file(
            {name: value.clone() for name, value in state.items() if name != "phase"},
            directory / "model.safetensors",
        )
    model.save_model(directory / "saved.safetensors")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the same training under two strategies, and of another training."""
    root = tmp_path_factory.mktemp("runs")
    shoal.launch(train, "ddp", root / "ddp", world_size=1)
    shoal.launch(train, "zero2", root / "zero2", world_size=3)
    shoal.launch(train, "ddp", root / "reference", "reference", world_size=1)
    shoal.launch(train, "ddp", root / "other", "write", 0.02, world_size=1)
    return root


@pytest.mark.parametrize("block", [2, 1 << 22])
def test_checkpoints_of_different_strategies_and_files_have_equal_bits(
    runs: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "_BLOCK", block)
    assert len(list((runs / "zero2" / "step-2").glob("shard-*"))) == 3
    (line,) = printed(runs / "ddp", runs / "zero2" / "step-2", status=0)
    assert line.startswith(f"{runs / 'ddp' / 'step-2'} and {runs / 'zero2' / 'step-2'} have the")
    printed(runs / "reference", runs / "zero2", status=0)
    for name in ("model.pt", "saved.safetensors"):
        (line,) = printed(runs / "ddp" / name, runs / "zero2", status=0)
        assert line.endswith("have the same 5 tensors, bit for bit")
    *_, line = printed(runs / "ddp" / "model.safetensors", runs / "zero2", status=1)
    assert line == f"  only in {runs / 'zero2' / 'step-2'}: 'model/phase'"


def test_directory_with_one_safetensors_file_stands_for_the_file(
    runs: Path, tmp_path: Path
) -> None:
    file = tmp_path / "adapter_model.safetensors"
    shutil.copy(runs / "ddp" / "saved.safetensors", file)
    (tmp_path / "adapter_config.json").write_text("{}")
    (line,) = printed(tmp_path, runs / "ddp", status=0)
    assert line.startswith(f"{file} and ")
    shutil.copy(file, tmp_path / "another.safetensors")
    result = CliRunner().invoke(app, ["compare", str(tmp_path), str(runs / "ddp")])
    assert isinstance(result.exception, ConfigurationError)


def test_other_values_are_measured_by_part(runs: Path) -> None:
    _, *lines = printed(runs / "ddp", runs / "other", status=1)
    parts = {line.split(":")[0].strip(): line for line in lines}
    assert set(parts) == {"model", "optimizer", "registered"}
    assert "model: 3 of 5 tensors differ; largest difference 0.0" in parts["model"]
    _, line = printed(runs / "reference", runs / "other" / "model.pt", status=1)
    assert line == parts["model"], "frozen values are equal by their digests"


def test_a_damaged_checkpoint_and_other_files_are_errors(runs: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    damaged = shutil.copytree(runs / "other", tmp_path / "damaged")
    file = next((damaged / "step-2").glob("optimizer*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert isinstance(
        runner.invoke(app, ["compare", str(damaged), str(runs / "ddp")]).exception,
        CorruptDataError,
    )
    torch.save({"step": 3}, tmp_path / "no-model.pt")
    (tmp_path / "text.pt").write_text("text")
    (tmp_path / "text.safetensors").write_text("text")
    for place in ("absent", "no-model.pt", "text.pt", "text.safetensors", "."):
        error = runner.invoke(app, ["compare", str(tmp_path / place), str(runs / "ddp")]).exception
        assert isinstance(error, ConfigurationError), place
        assert "expected a" in str(error) or "not a safetensors file" in str(error)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (torch.tensor([1.0, -4.5]), "0.5 in 'w', largest relative difference 0.111 in 'w'"),
        (torch.tensor([1.0, math.nan]), "inf in 'w', largest relative difference inf in 'w'"),
        (torch.tensor([1, -4]), "model/w: float32 [2] and int64 [2]"),
        (torch.tensor([[1.0], [-4.0]]), "model/w: float32 [2] and float32 [2, 1]"),
    ],
)
def test_differences_are_absolute_and_relative_to_the_largest_value(
    other: torch.Tensor, expected: str, tmp_path: Path
) -> None:
    torch.save({"w": torch.tensor([1.0, -4.0]), "b": torch.zeros(1)}, tmp_path / "one.pt")
    torch.save({"w": other, "b": torch.zeros(1)}, tmp_path / "other.pt")
    lines = printed(tmp_path / "one.pt", tmp_path / "other.pt", status=1)
    assert "model: 1 of 2 tensors differ" in lines[1]
    assert lines[-1].endswith(expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint64, torch.float8_e4m3fn, torch.complex64])
def test_every_dtype_is_measured_and_equal_nans_and_infinities_are_equal(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.save({"w": torch.tensor([0, 1]).to(dtype)}, tmp_path / "one.pt")
    torch.save({"w": torch.tensor([1, 1]).to(dtype)}, tmp_path / "other.pt")
    _, line = printed(tmp_path / "one.pt", tmp_path / "other.pt", status=1)
    assert "largest difference 1 in 'w', largest relative difference 1 in 'w'" in line
    for name, last in (("one", 0.0), ("other", -0.0)):
        torch.save({"w": torch.tensor([math.inf, math.nan, last])}, tmp_path / f"{name}.pt")
    _, line = printed(tmp_path / "one.pt", tmp_path / "other.pt", status=1)
    assert "largest difference 0 in 'w'" in line
