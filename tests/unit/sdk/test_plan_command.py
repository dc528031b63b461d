"""`shoal plan` on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shoal.cli.app import app
from shoal_common.errors import ConfigurationError
from typer.testing import CliRunner

_MODULE = """
import torch
from torch import nn

def make():
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    return net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), torch.zeros(4, 8)

def with_values():
    net = nn.Linear(8, 8)
    if net.weight.sum().item() == 0.5:
        raise AssertionError
    return net, torch.optim.SGD(net.parameters(), 0.1)

def wrong():
    return nn.Linear(8, 8)
"""


def _plan(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (directory / "training.py").write_text(_MODULE)
    command = [sys.executable, "-m", "shoal", "plan", *words]
    environment = {**os.environ, "COLUMNS": "80"}
    return subprocess.run(
        command,
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_a_module_and_a_file_are_planned_and_the_json_has_all_rows(tmp_path: Path) -> None:
    shown = _plan(tmp_path, "training:make", "--world-size", "4", "--device-memory", "1GB")
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr == ""
    assert "recommended: shoal.as_distributed(model, optimizer, strategy=" in shown.stdout
    finished = _plan(tmp_path, "training.py:make", "--world_size", "4", "--json")
    found = json.loads(finished.stdout)
    assert found["world_size"] == 4
    assert found["global_batch_size"] == 16
    ddp = next(each for each in found["strategies"] if each["strategy"] == "ddp")
    parameters = 4 * (8 * 32 + 32 + 32 * 4 + 4)
    assert ddp["memory"]["parameters"] == ddp["memory"]["optimizer"] == parameters


@pytest.mark.slow
def test_model_that_needs_values_is_built_with_them_and_that_is_reported(
    tmp_path: Path,
) -> None:
    shown = _plan(tmp_path, "training:with_values", "--world-size", "2")
    assert shown.returncode == 0, shown.stderr
    assert "training:with_values does not run on the meta device (RuntimeError: " in shown.stderr
    assert "no example of the model's inputs" in shown.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("training", "--world-size", "2"),
            "MODULE:FUNCTION='training': expected a module or a file, a colon and a function",
        ),
        (("no_such_module:make", "--world-size", "2"), "module 'no_such_module' is neither in"),
        (("no_such_file.py:make", "--world-size", "2"), "the file no_such_file.py does not exist"),
        (
            ("training:maker", "--world-size", "2"),
            "training has no function 'maker'; its functions: make, with_values, wrong",
        ),
        (
            ("training:wrong", "--world-size", "2"),
            "training:wrong returned Linear; expected (model, optimizer)",
        ),
        (
            ("training:make", "--world-size", "0"),
            "world_size=0: expected a number of ranks, at least 1",
        ),
        (
            ("training:make", "--world-size", "2", "--device-memory", "much"),
            "device_memory='much': expected a positive number of bytes",
        ),
    ],
)
def test_model_that_cannot_be_planned_is_named(
    tmp_path: Path, words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "training.py").write_text(_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "training", raising=False)
    error = CliRunner().invoke(app, ["plan", *words]).exception
    sys.modules.pop("training", None)
    assert isinstance(error, ConfigurationError)
    assert message in str(error)


def test_an_error_is_one_line_and_status_2(tmp_path: Path) -> None:
    shown = _plan(tmp_path, "training:make", "--world-size", "0")
    assert shown.stderr == "shoal: world_size=0: expected a number of ranks, at least 1\n"
    assert shown.returncode == 2
