"""The disk of one of two ranks is full: `shoal run` reports that rank as the first failure, no
matter which of the two exits first."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import pytest

Shell = Any  # of tests/integration/conftest.py

TRAINING = """
    import os, resource, signal, torch, shoal
    from torch import nn

    shoal.init()
    torch.manual_seed(0)
    net = nn.Linear(64, 64)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.Adam(net.parameters(), 0.01), strategy="zero2"
    )
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(torch.ones(64, 64)), global_batch_size=4
    )
    if shoal.rank() == {rank}:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY)
        )  # as of a full disk
    for epoch in loader.epochs({epochs}):
        for (rows,) in loader:
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            shoal.save_checkpoint("checkpoints", every_steps=5)
"""


@pytest.mark.parametrize("rank", [pytest.param(0, marks=[pytest.mark.slow, pytest.mark.fresh]), 1])
@pytest.mark.parametrize(
    "epochs", [1000, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.fresh])]
)
def test_rank_with_a_full_disk_is_reported_as_the_first_failure(
    shell: Shell, rank: int, epochs: int
) -> None:
    """Rank 0 completes the checkpoint, so it hears of the other rank's failure and raises in the
    same step."""
    text = TRAINING.replace("{rank}", str(rank)).replace("{epochs}", str(epochs))
    command = shell.start(
        "run", "--standalone", "--nproc-per-node", "2", shell.script(textwrap.dedent(text))
    )
    assert command.wait() == 1, command.stderr
    received = command.stderr.partition("First failure")[2].partition("Later failures")[0]
    assert re.search(rf"rank +: {rank} ", received), command.stderr
    assert "File too large" in received
