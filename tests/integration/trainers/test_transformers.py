"""transformers' Trainer under `shoal run`: workers are killed, others join, all are asked to leave;
it ends as one process alone would."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainers.runs import IN_TWO, Alone, finish, runs_alone

Shell = Any  # of tests/integration/conftest.py

PROGRAM = Path(__file__).parents[1] / "programs" / "elastic_transformers.py"
OFFLINE = {"HF_HUB_OFFLINE": "1"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Returns the final state of one process without a job and the model that it writes, by
    strategy."""
    return runs_alone(tmp_path_factory, PROGRAM, "model/model.safetensors", OFFLINE)


@pytest.mark.parametrize(
    ("strategy", "mode", "like"),
    [
        ("ddp", "kill", "ddp"),
        pytest.param("zero1", "late", "zero2", marks=pytest.mark.matrix),
        pytest.param("zero2", "kill", "zero2", marks=pytest.mark.matrix),
        pytest.param("zero3", "late", "zero2", marks=pytest.mark.matrix),
        pytest.param("fsdp", "kill", "zero2", marks=pytest.mark.matrix),
    ],
)
def test_a_killed_worker_and_its_replacement_change_nothing(
    shell: Shell, alone: Any, strategy: str, mode: str, like: str
) -> None:
    """Weights, losses and metrics, what callbacks have counted, and what was logged, on all ranks,
    bit for bit."""
    expected, model = alone(like)
    assert expected["steps"] == 40
    shell.environment.update(OFFLINE)
    command = shell.start(*IN_TWO, PROGRAM, shell.directory / "run", strategy, mode)
    results = finish(command)
    assert "ended with SIGKILL; continuing" in command.stderr
    assert results == [expected | {"world": 2}] * 2
    assert command.stdout.count("'train_loss'") == 1, "one rank prints"
    assert (
        shell.directory / "run" / "model" / "model.safetensors"
    ).read_bytes() == model.read_bytes()


def test_all_asked_to_leave_and_begun_again_it_ends_as_without(shell: Shell, alone: Any) -> None:
    expected, _ = alone("zero2")
    shell.environment.update(OFFLINE)
    directory = shell.directory / "run"
    command = shell.start(*IN_TWO, PROGRAM, directory, "zero2", "slow")
    command.wait_for_output("'epoch': '2'}")
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM, command.stderr
    stopped = sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*"))
    assert stopped, "train() saves where it is stopped"
    assert 10 <= stopped[-1] < 40
    results = finish(shell.start(*IN_TWO, PROGRAM, directory, "zero2"))
    assert results == [expected | {"world": 2}] * 2
    assert len([*directory.glob("step-*")]) == 2, "save_total_limit"
