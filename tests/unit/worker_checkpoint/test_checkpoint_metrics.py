"""The metrics of checkpoints that were written and of those that failed."""

from __future__ import annotations

from pathlib import Path

import pytest
import shoal
import torch
from shoal_common.errors import ShoalError
from shoal_worker.checkpoint import saving
from shoal_worker.elastic.session.worker_process import current_session
from torch import nn

pytestmark = pytest.mark.usefixtures("fresh_session")


def metric(name: str, **labels: str) -> float | None:
    session = current_session()
    assert session is not None
    return session.metrics.registry.get_sample_value(f"shoal_worker_{name}", labels)


def save_a_model(directory: Path) -> None:
    net = nn.Linear(1, 1)
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 1e-3))
    model(torch.ones(4, 1)).square().mean().backward()
    optimizer.step()
    shoal.save_checkpoint(directory)
    session = current_session()
    assert session is not None
    saving.CheckpointSaver.of(session).close(saving.DISK_PATIENCE)


def test_written_checkpoint_is_counted_and_timed(tmp_path: Path) -> None:
    save_a_model(tmp_path)
    assert (
        metric("checkpoints_total", outcome="written"),
        metric("checkpoints_total", outcome="failed"),
    ) == (1, 0)
    assert metric("checkpoint_seconds_count") == 1
    assert (metric("checkpoint_timestamp_seconds") or 0) > 1.7e9


def test_checkpoint_that_cannot_be_written_counts_as_failed(tmp_path: Path) -> None:
    """A checkpoint that cannot be written, because a file is in the place of its parent directory,
    counts as failed."""
    place = tmp_path / "checkpoints"
    place.write_text("")
    with pytest.raises(ShoalError):
        save_a_model(place / "of-this-run")
    assert (
        metric("checkpoints_total", outcome="written"),
        metric("checkpoint_timestamp_seconds"),
    ) == (
        0,
        0,
    )
    assert metric("checkpoints_total", outcome="failed") == 1
