"""Unmodified models of Lightning under Shoal's strategy: its BoringModel, with which it tests its
own strategies, and its port of the word language model from torch's examples."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.trainers.runs import IN_TWO, Alone, finish, received, run_alone, runs_alone

Shell = Any  # of tests/integration/conftest.py

PROGRAM = Path(__file__).parents[1] / "programs" / "lightning_demos.py"

pytestmark = [pytest.mark.slow, pytest.mark.fresh, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a text of 48 windows of 35 words, at the path that the language
    model reads."""
    directory = tmp_path_factory.mktemp("words")
    draw = random.Random(0)
    lines = [" ".join(f"word{draw.randrange(60)}" for _ in range(20)) for _ in range(82)]
    (directory / "data").mkdir()
    (directory / "data" / "wikitext-2.txt").write_text("\n".join(lines) + "\n")
    return directory


def weights(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return state


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Returns the final state of one process under Lightning's own strategy, by model."""
    return runs_alone(tmp_path_factory, PROGRAM, "model.ckpt", {}, "plain")


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "zero2",
        "fsdp",
        pytest.param("zero1", marks=pytest.mark.matrix),
        pytest.param("zero3", marks=pytest.mark.matrix),
    ],
)
def test_boring_model_is_fitted_validated_tested_and_used_for_prediction(
    shell: Shell, alone: Alone, strategy: str
) -> None:
    """A BoringModel draws new data for each of these, so only its weights are compared with another
    process. The ranks agree on all results."""
    expected, model = alone("boring")
    results = finish(shell.start(*IN_TWO, PROGRAM, shell.directory / "run", "boring", strategy))
    assert results[0] == results[1]
    assert results[0]["steps"] == expected["steps"] == 128
    assert len(results[0]["predicted"]) == len(expected["predicted"]) == 64
    torch.testing.assert_close(
        weights(shell.directory / "run" / "model.ckpt"), weights(model), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("ddp", marks=pytest.mark.matrix)])
def test_the_language_model_of_torchs_examples_survives_a_kill(
    shell: Shell, words: Path, strategy: str
) -> None:
    """The run, with dropout, ends bit for bit like one process. One worker of the machine prepares
    the data, and the replacement of a killed worker does not prepare them again."""
    expected = run_alone(PROGRAM, shell.directory / "alone", "language", {}, strategy, cwd=words)
    (shell.directory / "data").symlink_to(words / "data")
    command = shell.start(*IN_TWO, PROGRAM, shell.directory / "run", "language", strategy, "kill")
    assert command.wait() == 0, command.stderr + command.stdout
    assert "ended with SIGKILL; continuing" in command.stderr
    assert command.stdout.count("prepares data") == 1
    assert [each["steps"] for each in received(command.stdout)] in (
        [expected["steps"]],
        [expected["steps"]] * 2,
    )
    run, alone = (weights(shell.directory / name / "model.ckpt") for name in ("run", "alone"))
    torch.testing.assert_close(run, alone, rtol=0, atol=0)
