"""transformers' Trainer under `shoal run`: workers are killed, others join, or all are asked to
leave. The run ends like a single process. Evaluations may generate."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainers.runs import IN_TWO, Alone, finish, run_alone, runs_alone

Shell = Any  # of tests/integration/conftest.py

PROGRAMS = Path(__file__).parents[1] / "programs"
PROGRAM = PROGRAMS / "elastic_transformers.py"
SEQ2SEQ = PROGRAMS / "elastic_seq2seq.py"
OFFLINE = {"HF_HUB_OFFLINE": "1"}

pytestmark = [pytest.mark.slow, pytest.mark.fresh, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Returns the final state of one process without a job and the model file that it writes, by
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
    """Weights of the best model, losses and metrics, counts of callbacks, and logged values are
    equal bit for bit on all ranks."""
    expected, model = alone(like)
    assert (expected["steps"], expected["best_step"]) == (40, 20)
    shell.environment.update(OFFLINE)
    command = shell.start(*IN_TWO, PROGRAM, shell.directory / "run", strategy, mode)
    results = finish(command)
    assert "ended with SIGKILL; continuing" in command.stderr
    assert results == [expected | {"world": 2}] * 2
    assert command.stdout.count("'train_loss'") == 1, "one rank prints"
    assert (
        shell.directory / "run" / "model" / "model.safetensors"
    ).read_bytes() == model.read_bytes()


def test_run_interrupted_on_all_ranks_and_restarted_ends_like_an_uninterrupted_one(
    shell: Shell, alone: Any
) -> None:
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
    kept = sorted(path.name for path in directory.glob("step-*"))
    assert kept == ["step-20", "step-35", "step-40"], "the best, beside save_total_limit"


def test_best_model_survives_a_worker_killed_while_it_is_saved(shell: Shell, alone: Any) -> None:
    """The survivors repeat the checkpoint that lacks the dead worker's part."""
    expected, _ = alone("zero2")
    shell.environment.update(OFFLINE)
    command = shell.start(*IN_TWO, PROGRAM, shell.directory / "run", "zero2", "saving")
    results = finish(command)
    assert "ended with SIGKILL; continuing" in command.stderr
    assert results
    for result in results:
        assert result | {"world": 1} == expected


@pytest.fixture(scope="module")
def generated_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the outputs that one process generates."""
    return run_alone(SEQ2SEQ, tmp_path_factory.mktemp("seq2seq"), "zero2", OFFLINE)


@pytest.mark.parametrize(
    "strategy",
    [
        "zero3",
        *(
            pytest.param(name, marks=pytest.mark.matrix)
            for name in ("ddp", "zero1", "zero2", "fsdp")
        ),
    ],
)
def test_evaluations_generate_the_same_under_any_strategy_despite_deaths(
    shell: Shell, generated_alone: dict[str, Any], strategy: str
) -> None:
    shell.environment.update(OFFLINE)
    command = shell.start(*IN_TWO, SEQ2SEQ, shell.directory / "run", strategy, "kill")
    results = finish(command)
    assert "ended with SIGKILL; continuing" in command.stderr
    assert results
    for result in results:
        assert result == generated_alone
