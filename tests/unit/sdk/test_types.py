"""The types of the public API that type checkers and editors see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_SCRIPT = """
from typing import assert_type

import shoal
import torch
from torch import nn


def use(net: nn.Sequential, optimizer: torch.optim.AdamW, name: str) -> None:
    assert_type(shoal.as_distributed(net, optimizer), tuple[shoal.DDPModel, shoal.DDPOptimizer])
    assert_type(shoal.as_distributed(net), shoal.DDPModel)
    assert_type(
        shoal.as_distributed(net, optimizer, strategy="local_sgd"),
        tuple[shoal.LocalSGDModel, shoal.LocalSGDOptimizer],
    )
    assert_type(shoal.as_distributed(net, strategy="async_sgd"), shoal.AsyncSGDModel)
    assert_type(
        shoal.as_distributed(net, optimizer, strategy="zero3", offload="cpu"),
        tuple[shoal.ShardedModel, shoal.ShardedOptimizer],
    )
    assert_type(shoal.as_distributed(net, strategy=name), shoal.ShardedModel)
    assert_type(
        shoal.as_distributed((net, net), (optimizer, optimizer)),
        tuple[tuple[shoal.ShardedModel, ...], tuple[shoal.ShardedOptimizer, ...]],
    )
"""


@pytest.mark.slow
def test_as_distributed_returns_the_classes_of_its_strategy(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(script)],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=450,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
