"""transformers' Trainer under `shoal run`: workers are killed, others join, all are asked to leave; it ends as one process alone would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

Shell = Any  # of tests/integration/conftest.py

PROGRAM = Path(__file__).parents[1] / "programs" / "elastic_transformers.py"
IN_TWO = ("run", "--standalone", "--nproc-per-node", "2")
OFFLINE = {"HF_HUB_OFFLINE": "1"}
DEADLINE_S = 200.0
"""Three processes import transformers, and then a fourth."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def told(output: str) -> list[dict[str, Any]]:
    """What the processes say that they ended with."""
    return [json.loads(line.split("told ", 1)[1]) for line in output.splitlines() if "told {" in line]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Any], Path]]:
    """What one process without a job ends with, by strategy, and the model that it writes."""

    @cache
    def run(strategy: str) -> tuple[dict[str, Any], Path]:
        directory = tmp_path_factory.mktemp(strategy)
        command = [sys.executable, PROGRAM, directory, strategy]
        ended = subprocess.run(command, check=False, env={**os.environ, **OFFLINE}, capture_output=True, text=True, timeout=DEADLINE_S)
        assert ended.returncode == 0, ended.stderr
        (result,) = told(ended.stdout)
        return result, directory / "model" / "model.safetensors"

    return run


def finish(command: Any) -> list[dict[str, Any]]:
    """Waits for the end of a run, which is a good one."""
    try:
        status = command.process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        status = None
    assert status == 0, command.stderr + command.stdout
    return told(command.stdout)


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
def test_a_killed_worker_and_its_replacement_change_nothing(shell: Shell, alone: Any, strategy: str, mode: str, like: str) -> None:
    """Weights, losses and metrics, what callbacks have counted, and what was logged, on all ranks, bit for bit."""
    expected, model = alone(like)
    assert expected["steps"] == 40
    shell.environment.update(OFFLINE)
    command = shell.start(*IN_TWO, PROGRAM, shell.directory / "run", strategy, mode)
    results = finish(command)
    assert "ended with SIGKILL; the others go on" in command.stderr
    assert results == [expected | {"world": 2}] * 2
    assert command.stdout.count("'train_loss'") == 1, "one rank prints"
    assert (shell.directory / "run" / "model" / "model.safetensors").read_bytes() == model.read_bytes()


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
