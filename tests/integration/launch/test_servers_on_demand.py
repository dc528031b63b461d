"""A script that needs parameter servers gets one under `--standalone`, even if the command line
requests none."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

Shell = Any  # of tests/integration/conftest.py
Command = Any

TRAINING = """
    import torch, shoal

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model, optimizer = shoal.as_distributed(
        model, torch.optim.SGD(model.parameters(), 2.0**-8), strategy="async_sgd"
    )
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(torch.ones(64, 4)), batch_size=4
    )
    seen = 0
    for epoch in loader.epochs(EPOCHS):
        for (rows,) in loader:
            optimizer.zero_grad()
            model(rows).mean().backward()
            optimizer.step()
            seen += len(rows)
    print("saw", seen)
"""


def script_of(shell: Shell, epochs: int) -> Any:
    return shell.script(textwrap.dedent(TRAINING).replace("EPOCHS", str(epochs)))


def started(command: Command) -> Iterator[psutil.Process]:
    """Returns the parameter server processes among the command's processes."""
    for process in command.family():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if "shoal_ps_server" in process.cmdline():
                yield process


def served(shell: Shell) -> bool:
    return any(member.progress.step > 0 for member in shell.job().members)


def test_script_that_needs_a_server_gets_one_and_sees_every_sample_once(shell: Shell) -> None:
    command = shell.start("run", "--standalone", "--nproc-per-node", "2", script_of(shell, 3))
    assert command.wait() == 0, command.stderr
    assert (
        "the script uses parameter servers, so server-0 was started; use --servers N to start more"
        in command.stderr
    )
    seen = [
        int(line.partition("saw ")[2]) for line in command.stdout.splitlines() if "saw " in line
    ]
    assert len(seen) == 2
    assert sum(seen) == 3 * 64


@pytest.mark.slow
@pytest.mark.fresh
def test_killed_server_that_was_started_for_a_script_returns(
    shell: Shell,
) -> None:
    command = shell.start("run", "--standalone", "--nproc-per-node", "2", script_of(shell, 60))
    command.wait_for(lambda: any(started(command)), "the parameter server's process")
    command.wait_for(lambda: served(shell), "a step with it")
    next(started(command)).kill()
    assert command.wait() == 0, command.stderr
    assert "was restarted as pid" in command.stderr
    assert (
        sum(
            int(line.partition("saw ")[2]) for line in command.stdout.splitlines() if "saw " in line
        )
        == 60 * 64
    )
