"""Lightning's Trainer under `shoal run`: workers are killed, others join, or all are asked to
leave. The run ends like a single process."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.trainers.runs import IN_TWO, Alone, finish, run_alone, runs_alone

Shell = Any  # of tests/integration/conftest.py

PROGRAM = Path(__file__).parents[1] / "programs" / "elastic_lightning.py"
EVALUATIONS = PROGRAM.with_name("lightning_evaluations.py")

pytestmark = [pytest.mark.slow, pytest.mark.fresh, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Returns the final state of one process without a job and the model file that it writes, by
    strategy."""
    return runs_alone(tmp_path_factory, PROGRAM, "model.ckpt", {})


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Returns the module's state in a file that `trainer.save_checkpoint` wrote."""
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return state


def test_single_process_matches_lightnings_own_strategy(alone: Alone) -> None:
    (plain, its_model), (ours, our_model) = alone("plain"), alone("alike")
    assert (plain["steps"], plain["epochs"]) == (ours["steps"], ours["epochs"]) == (40, 8)
    torch.testing.assert_close(weights(our_model), weights(its_model), rtol=0, atol=1e-6)
    for one, other in zip(ours["course"], plain["course"], strict=True):
        assert one == pytest.approx(other, abs=2e-5)


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        ("ddp", "kill"),
        pytest.param("zero1", "late", marks=pytest.mark.matrix),
        pytest.param("zero2", "kill", marks=pytest.mark.matrix),
        pytest.param("zero3", "late", marks=pytest.mark.matrix),
        pytest.param("fsdp", "kill", marks=pytest.mark.matrix),
    ],
)
def test_a_killed_worker_and_its_replacement_change_nothing(
    shell: Shell, alone: Alone, strategy: str, mode: str
) -> None:
    """On all ranks, weights are equal bit for bit, and so are the losses and metrics of all epochs
    and the counts of callbacks. Other logged values are exact, with one exception, which is
    reported: under ddp, a worker may die after a step has been committed and before the others have
    its value."""
    expected, model = alone("ddp" if strategy == "ddp" else "zero2")
    expected = json.loads(json.dumps(expected))
    assert (expected["steps"], expected["epochs"], len(expected["course"])) == (40, 8, 8)
    command = shell.start(*IN_TWO, PROGRAM, shell.directory / "run", strategy, mode)
    results = finish(command)
    assert "ended with SIGKILL; continuing" in command.stderr
    errors, its_errors = (
        [[epoch.pop("error") for epoch in one["course"]] for one in these]
        for these in (results, [expected])
    )
    assert results == [expected | {"world": 2}] * 2
    assert errors[0] == errors[1]
    apart = sum(one != other for one, other in zip(errors[0], its_errors[0], strict=True))
    assert apart == 0 or (
        apart == 1
        and "a worker died after a step, before its logged" in command.stderr + command.stdout
    )
    torch.testing.assert_close(
        weights(shell.directory / "run" / "model.ckpt"), weights(model), rtol=0, atol=0
    )


@pytest.mark.matrix
def test_run_interrupted_on_all_ranks_and_restarted_ends_like_an_uninterrupted_one(
    shell: Shell, alone: Alone
) -> None:
    expected, _ = alone("zero2")
    directory = shell.directory / "run"
    command = shell.start(*IN_TWO, PROGRAM, directory, "zero2", "slow")
    command.wait_for_output("step 12 is over")
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM, command.stderr
    stopped = sorted(
        int(path.name.removeprefix("step-")) for path in (directory / "checkpoints").glob("step-*")
    )
    assert 12 <= stopped[-1] < 40, "fit saves where it is stopped"
    results = finish(shell.start(*IN_TWO, PROGRAM, directory, "zero2"))
    assert results == [expected | {"world": 2}] * 2
    assert len([*(directory / "checkpoints").glob("step-*")]) == 2, "keep"


def nearly(value: Any) -> Any:
    """Rounds floats to five decimal places."""
    if isinstance(value, dict):
        return {name: nearly(each) for name, each in value.items()}
    if isinstance(value, list):
        return [nearly(each) for each in value]
    return pytest.approx(value, abs=1e-5) if isinstance(value, float) else value


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        ("zero3", "kill"),
        ("ddp", "late"),
        *(
            pytest.param(each, "", marks=pytest.mark.matrix)
            for each in ("ddp", "zero1", "zero2", "fsdp", "hsdp")
        ),
    ],
)
def test_evaluations_metrics_and_logs_match_lightnings_own_strategy(
    shell: Shell, evaluated_alone: dict[str, Any], strategy: str, mode: str
) -> None:
    """All results equal those of one process without Shoal, even if a worker is killed in a
    training step or in the middle of a test."""
    directory = shell.directory / "run"
    command = shell.start(*IN_TWO, "--max-restarts", "0", EVALUATIONS, directory, strategy, mode)
    results = finish(command)
    assert ("ended with SIGKILL" in command.stderr) == bool(mode)
    for result in results:
        assert result == nearly(evaluated_alone["told"] | {"world": 1 if mode else 2})
    assert len(results) == (1 if mode else 2)
    for name, rows in evaluated_alone["written"].items():
        assert (directory / name).read_text().splitlines() == rows
    logged = (directory / "csv/version_0/metrics.csv").read_text().splitlines()
    assert [len(row.split(",")) for row in logged] == [
        len(row.split(",")) for row in evaluated_alone["logged"]
    ]


@pytest.fixture(scope="module")
def evaluated_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the results of the program under Lightning's own strategy, and the files that it
    writes, by name."""
    directory = tmp_path_factory.mktemp("evaluations")
    result = run_alone(EVALUATIONS, directory, "plain", {})
    written = {path.name: path.read_text().splitlines() for path in directory.glob("*.json")}
    assert len(written) == 6, "five batches of predictions, and all of them"
    logged = (directory / "csv/version_0/metrics.csv").read_text().splitlines()
    return {"told": result, "written": written, "logged": logged}
