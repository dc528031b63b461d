"""A loop over epochs without an end, as of a script that stops at a number of steps, is one whose
length is not known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import shoal
import torch
from shoal_common.tally import TallyWriter, read_tally
from shoal_worker.elastic.session.worker_process import current_session
from torch import nn
from torch.utils.data import TensorDataset


@pytest.mark.usefixtures("fresh_session")
@pytest.mark.parametrize(("epochs", "told"), [(3, 12), (sys.maxsize, 0)])
def test_its_steps_are_tallied(tmp_path: Path, epochs: int, told: int) -> None:
    net = nn.Linear(2, 1)
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    progress = current_session().progress
    progress.tally_writer = TallyWriter(tmp_path / "tally")
    loader = shoal.ElasticDataLoader(TensorDataset(torch.ones(8, 2)), global_batch_size=2)
    for _ in loader.epochs(epochs):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        break
    tally = read_tally(tmp_path / "tally")
    assert tally is not None
    assert (tally.steps, tally.counts.steps_in_all) == (4, told)
