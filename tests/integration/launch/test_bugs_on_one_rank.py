"""A script that raises on one rank ends the job while the others wait for that rank. The status is
not 0, and the output names the rank."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import pytest

Shell = Any  # of tests/integration/conftest.py
Command = Any

TRAINING = """
    import torch, shoal
    from torch import nn

    shoal.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model, optimizer = shoal.as_distributed(
        model, torch.optim.SGD(model.parameters(), 0.1), {strategy}
    )
    rows = torch.ones(64, 4)
    loader = shoal.ElasticDataLoader(torch.utils.data.TensorDataset(rows), global_batch_size=4)
    for epoch in loader.epochs({epochs}):
        for (rows,) in loader:
            optimizer.zero_grad()
            {step}
            optimizer.step()
"""
PLAIN = "model(rows).square().mean().backward()"


FOR_HOURS = 10_000
A_MOMENT = 3
"""Number of epochs."""


def run(shell: Shell, *, strategy: str, step: str, epochs: int = FOR_HOURS) -> Command:
    """Runs a training script on two ranks for `epochs` epochs; returns when the launcher
    has ended."""
    body = (
        TRAINING.replace("{strategy}", strategy)
        .replace("{step}", step)
        .replace("{epochs}", str(epochs))
    )
    command = shell.start(
        "run", "--standalone", "--nproc-per-node", "2", shell.script(textwrap.dedent(body))
    )
    command.wait()
    return command


def check_reported(command: Command, *, rank: int, error: str) -> None:
    """Checks that the status is 1, and that the first failure shows the rank, the error and the
    script's line."""
    assert command.wait() == 1, command.stderr
    received = command.stderr.partition("First failure")[2].partition("Later failures")[0]
    assert re.search(rf"rank +: {rank} ", received), command.stderr
    assert re.search(r'File "\S+\.py", line \d+', received), command.stderr
    assert error in received


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param(1, marks=[pytest.mark.slow, pytest.mark.fresh]),
        pytest.param(3, marks=pytest.mark.matrix),
    ],
)
def test_bug_on_one_rank_under_zero3_fails_the_run_even_if_the_other_could_finish(
    shell: Shell, runs: int
) -> None:
    """The order in which the two ranks end differs between runs. The second rank may or may not
    have noticed the end of the first."""
    bug = (
        "if shoal.rank() == 1 and loader.global_step == 5: raise ValueError('a bug on one "
        f"rank')\n            {PLAIN}"
    )
    for _ in range(runs):
        command = run(shell, strategy="strategy='zero3'", step=bug, epochs=A_MOMENT)
        check_reported(command, rank=1, error="ValueError: a bug on one rank")


@pytest.mark.slow
@pytest.mark.fresh
def test_a_bug_on_one_rank_under_zero3_ends_a_long_job(shell: Shell) -> None:
    bug = (
        "if shoal.rank() == 1 and loader.global_step == 5: raise ValueError('a bug on one "
        f"rank')\n            {PLAIN}"
    )
    check_reported(
        run(shell, strategy="strategy='zero3'", step=bug),
        rank=1,
        error="ValueError: a bug on one rank",
    )


@pytest.mark.slow
@pytest.mark.fresh
def test_configuration_refused_by_one_pipeline_stage_ends_the_job(shell: Shell) -> None:
    """The other stage, which waits for gradients, could otherwise train all stages on its own."""
    step = (
        "model.train_step(rows, loss_fn=lambda output, _: output if shoal.rank() == 1 else "
        "output.square().mean())"
    )
    command = run(shell, strategy="strategy='pipeline'", step=step)
    check_reported(command, rank=1, error="ConfigurationError: the loss of a micro-batch is")


@pytest.mark.slow
@pytest.mark.fresh
def test_bug_in_the_first_step_on_half_of_a_replica_ends_the_job(shell: Shell) -> None:
    """Without that rank the other half of the replica cannot continue, and no rank can
    replace it."""
    bug = f"if shoal.rank() == 1: raise ValueError('a bug in the first step')\n            {PLAIN}"
    command = run(shell, strategy="strategy='hybrid', tensor_parallel_size=2", step=bug)
    check_reported(command, rank=1, error="ValueError: a bug in the first step")


def test_script_that_ends_on_one_rank_before_its_first_step_fails_the_run(shell: Shell) -> None:
    bug = f"if shoal.rank() == 1: raise SystemExit\n            {PLAIN}"
    command = run(shell, strategy="strategy='ddp'", step=bug, epochs=A_MOMENT)
    check_reported(command, rank=0, error="a peer's script finished after step 0")


def test_script_that_ends_on_one_rank_within_a_round_fails_the_run(shell: Shell) -> None:
    """The other rank notices at the end of the round, when its position is the round's start."""
    bug = f"if shoal.rank() == 1 and loader.global_step == 6: raise SystemExit\n            {PLAIN}"
    strategy = "strategy='local_sgd', sync_every=4"
    command = run(shell, strategy=strategy, step=bug, epochs=A_MOMENT)
    check_reported(command, rank=0, error="a peer's script finished after step 6")
