"""A hung worker does not notice that it was evicted from the job, so its launcher kills it."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import pytest

Shell = Any  # of tests/integration/conftest.py

TRAINING = """
    import os, pathlib, signal
    import shoal, torch

    shoal.init()
    net = torch.nn.Linear(3, 1)
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.01))
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(torch.randn(100, 3)), global_batch_size=10
    )
    hung = pathlib.Path("hung")
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if shoal.rank() == 1 and loader.global_step == 5 and not hung.exists():
            hung.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
    print("ended at step", loader.global_step, "of a world of", shoal.world_size())
"""


@pytest.mark.slow
@pytest.mark.fresh
@pytest.mark.timeout(180)
def test_run_finishes_without_its_hung_worker(shell: Shell) -> None:
    """The worker's lease is 30 s, and it then has 20 s to exit by itself."""
    command = shell.start(
        "run", "--standalone", "--nproc-per-node", "2", shell.script(textwrap.dedent(TRAINING))
    )
    assert command.wait() == 0, command.stderr
    assert re.search(
        r"worker 1 \(pid \d+\) was evicted from the job 2\d s ago and has not exited; killing it",
        command.stderr,
    )
    assert "[0]: ended at step 10 of a world of 1" in command.stdout
    assert "run completed; recovered from 1 worker failure" in command.stderr
    assert command.family() == []
