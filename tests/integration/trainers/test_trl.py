"""TRL's SFTTrainer and DPOTrainer under `shoal run`: one process gives what TRL's own classes give,
and a run in which a worker is killed and replaced ends like one process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.trainers.runs import IN_TWO, finish, run_alone

Shell = Any  # of tests/integration/conftest.py
Alone = Callable[[str, str], tuple[dict[str, Any], Path]]

PROGRAM = Path(__file__).parents[1] / "programs" / "elastic_trl.py"
OFFLINE = {"HF_HUB_OFFLINE": "1"}
STATE = "state-0.pt"
TOKEN_MEANS = ("entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected")

pytestmark = [pytest.mark.slow, pytest.mark.fresh, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Returns a function that runs one process without a job. It returns the final state that the
    process prints, and its directory."""

    @cache
    def run(strategy: str, kind: str) -> tuple[dict[str, Any], Path]:
        directory = tmp_path_factory.mktemp(f"{strategy}-{kind}")
        return run_alone(PROGRAM, directory, strategy, OFFLINE, kind), directory

    return run


def check_close(one: Any, other: Any, *, within: float) -> None:
    """Compares logged values: numbers up to `within`, all else exactly."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value == pytest.approx(other[name], rel=within, abs=within), name


def check_all_close(one: dict[str, Any], other: dict[str, Any], *, within: float) -> None:
    assert one["steps"] == other["steps"] >= 18
    check_close(one["evaluated"], other["evaluated"], within=within)
    assert len(one["history"]) == len(other["history"])
    for mine, theirs in zip(one["history"], other["history"], strict=True):
        check_close(mine, theirs, within=within)


@pytest.mark.parametrize(
    "kind",
    [
        "sft",
        "dpo-lora",
        *(
            pytest.param(kind, marks=pytest.mark.matrix)
            for kind in ("sft-lora", "sft-packed", "sft-divided", "dpo", "dpo-divided")
        ),
    ],
)
def test_one_process_matches_trls_own_class(alone: Alone, kind: str) -> None:
    """Weights, losses, and every logged value. Only the order of additions differs: of float32
    gradients, which Adam's division by their root mean square magnifies where they are tiny."""
    ours, theirs = alone("ddp", kind), alone("plain", kind)
    check_all_close(ours[0], theirs[0], within=2e-3)
    expected = torch.load(theirs[1] / STATE)
    for name, value in torch.load(ours[1] / STATE).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("ddp", "sft"),
        ("fsdp", "dpo-lora"),
        *(
            pytest.param(strategy, kind, marks=pytest.mark.matrix)
            for strategy, kind in [
                ("ddp", "dpo"),
                ("zero1", "sft-lora"),
                ("zero2", "dpo-lora"),
                ("zero2", "sft-packed"),
                ("zero3", "sft"),
                ("zero3", "dpo-lora"),
                ("fsdp", "dpo"),
                ("fsdp", "sft-lora"),
                ("hsdp", "sft"),
            ]
        ),
    ],
)
def test_a_killed_worker_and_its_replacement_change_nothing(
    shell: Shell, alone: Alone, strategy: str, kind: str
) -> None:
    """Weights are equal bit for bit. Logged values of all ranks' samples are those of one process,
    among them the number of tokens."""
    like = "ddp" if strategy == "ddp" else "zero2"
    expected, directory = alone(like, kind)
    shell.environment.update(OFFLINE)
    command = shell.start(*IN_TWO, PROGRAM, shell.directory / "run", strategy, kind, "kill")
    results = finish(command)
    assert "ended with SIGKILL; continuing" in command.stderr
    assert "died after a step" not in command.stderr
    assert results == [expected | {"world": 2}] * 2
    name = "adapter_model" if kind.endswith("-lora") else "model"
    written = Path("model") / f"{name}.safetensors"
    assert (shell.directory / "run" / written).read_bytes() == (directory / written).read_bytes()


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["sft-divided", "dpo-divided"])
def test_batches_divided_among_ranks_match_one_process(
    shell: Shell, alone: Alone, kind: str
) -> None:
    """Except for DPO's means over tokens in training steps, which the page documents."""
    expected, _ = alone("ddp", kind)
    shell.environment.update(OFFLINE)
    command = shell.start(*IN_TWO, PROGRAM, shell.directory / "run", "ddp", kind, "kill")
    results = finish(command)
    assert len(results) == 2
    ignored = TOKEN_MEANS if kind.startswith("dpo") else ()
    for result in results:
        for state in (result, expected):
            for entry in state["history"]:
                for name in ignored:
                    entry.pop(name, None)
        check_all_close(result, expected, within=2e-3)


def test_run_interrupted_on_all_ranks_and_restarted_ends_like_an_uninterrupted_one(
    shell: Shell, alone: Alone
) -> None:
    """The checkpoint contains the values logged next and the number of tokens."""
    expected, _ = alone("zero2", "dpo")
    shell.environment.update(OFFLINE)
    directory = shell.directory / "run"
    command = shell.start(*IN_TWO, PROGRAM, directory, "zero3", "dpo", "slow")
    command.wait_for_output("'epoch': '1'}")
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM, command.stderr
    (stopped,) = directory.glob("step-*")
    assert 3 <= int(stopped.name.removeprefix("step-")) < 18
    results = finish(shell.start(*IN_TWO, PROGRAM, directory, "zero3", "dpo"))
    assert results == [expected | {"world": 2}] * 2


@pytest.mark.matrix
def test_ranks_with_different_reference_models_are_stopped(shell: Shell) -> None:
    shell.environment.update(OFFLINE)
    status, _, error = shell.run(*IN_TWO, PROGRAM, shell.directory / "run", "ddp", "dpo-differing")
    assert status != 0
    assert "the ranks built different reference models" in error
