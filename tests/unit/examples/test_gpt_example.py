"""The GPT example trains on real text under every strategy that its flag can select."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal_worker.strategies import registry

GPT: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "gpt.py"))
SMALL = ["--batch", "4", "--length", "16", "--width", "16", "--layers", "2", "--heads", "2"]
OPTIONS = {"hybrid": ["--set", "tensor_parallel_size=2"]}
RUN_BELOW = {"ddp", "zero1", "zero3", "fsdp", "pipeline", "tensor"}
# the workers of async_sgd are processes
IN_LAUNCHES = sorted(set(registry.names()) - {"async_sgd"})


@pytest.fixture(scope="module", autouse=True)
def shorter_text() -> None:
    """Trains on the held-out text, which suffices here and is faster to read."""
    source = GPT["Source"]
    GPT["main"].__globals__["Source"] = lambda length, *, held_out: source(length, held_out=True)


def run(*arguments: str, world_size: int = 1) -> list[float]:
    return shoal.launch(GPT["main"], [*SMALL, *arguments], world_size=world_size)


def test_gpt_example_learns_from_the_standard_library() -> None:
    (before,) = run("--steps", "1")
    (after,) = run("--steps", "30")
    assert 7.5 < before < 8.5  # bits per byte; guessing costs 8
    assert after < 7.0


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(s, marks=pytest.mark.matrix) if s in RUN_BELOW else s for s in IN_LAUNCHES],
)
def test_gpt_example_runs_under_every_strategy(strategy: str) -> None:
    first, second = run(
        "--strategy", strategy, "--steps", "3", *OPTIONS.get(strategy, []), world_size=2
    )
    assert first == second
    assert 4.0 < first < 8.5


def test_equivalent_strategies_end_with_equal_parameters(tmp_path: Path) -> None:
    (alone,) = run("--steps", "3")
    for strategy in ("ddp", "zero3", "pipeline", "tensor"):
        assert run("--strategy", strategy, "--steps", "3", world_size=2) == pytest.approx(
            [alone, alone], rel=1e-4
        )


def test_gpt_example_resumes_from_a_checkpoint_and_generates_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = ["--checkpoints", str(tmp_path), "--strategy", "fsdp"]
    run("--steps", "2", *saved, world_size=2)
    run("--steps", "2", "--write", "8", *saved, world_size=2)
    assert "def main(" in capsys.readouterr().out
    net = GPT["Gpt"](16, 16, 2, 2)
    net.load_state_dict(shoal.load_full_state(tmp_path))
    assert net(torch.zeros(1, 16, dtype=torch.long)).shape == (1, 16, 256)
