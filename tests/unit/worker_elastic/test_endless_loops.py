"""A loop over epochs without an end has an unknown length. A loop that ends after a number of steps
has that length. The numbers that the script reports are tallied as well."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import shoal
import torch
from shoal_common.formats.tally import TallyWriter, read_tally
from shoal_worker.elastic.session.worker_process import current_session
from torch import nn
from torch.utils.data import TensorDataset


@pytest.mark.usefixtures("fresh_session")
@pytest.mark.parametrize(
    ("epochs", "max_steps", "length"),
    [(3, None, 12), (sys.maxsize, None, 0), (None, 10, 10), (3, 10, 10), (3, 100, 12)],
)
def test_steps_of_endless_loops_are_tallied(
    tmp_path: Path, epochs: int | None, max_steps: int | None, length: int
) -> None:
    net = nn.Linear(2, 1)
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    progress = current_session().progress
    progress.tally_writer = TallyWriter(tmp_path / "tally")
    loader = shoal.ElasticDataLoader(TensorDataset(torch.ones(8, 2)), global_batch_size=2)
    for _ in loader.epochs(epochs, max_steps=max_steps):
        for (x,) in loader:
            model(x).square().mean().backward()
            shoal.report(accuracy=0.5, lr=loader.global_step, other=math.nan)
            optimizer.step()
            optimizer.zero_grad()
        break
    tally = read_tally(tmp_path / "tally")
    assert tally is not None
    assert (tally.steps, tally.counts.steps_in_all) == (4, length)
    assert tally.metrics == {"accuracy": 0.5, "lr": 3.0}
    assert progress.snapshot().steps_in_all == length
