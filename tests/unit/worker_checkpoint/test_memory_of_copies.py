"""A save uses the memory of the previous copy again, once that copy is written."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import shoal
import torch
from shoal_common.errors import DeadlineError
from shoal_worker.checkpoint import saving
from shoal_worker.checkpoint.files import read_model
from shoal_worker.elastic.session.worker_process import current_session
from torch import nn

pytestmark = pytest.mark.usefixtures("fresh_session")


class Training:
    """A model that is trained on one rank."""

    def __init__(self) -> None:
        self.net = nn.Linear(3, 2)
        self.model, self.optimizer = shoal.as_distributed(
            self.net, torch.optim.SGD(self.net.parameters(), 0.1)
        )
        session = current_session()
        assert session is not None
        self.saver = saving.CheckpointSaver.of(session)

    def step(self) -> torch.Tensor:
        """Takes a step and returns a copy of the new weights."""
        self.model(torch.ones(4, 3)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.net.weight.detach().clone()


def test_next_copy_reuses_the_memory_of_the_last_one(tmp_path: Path) -> None:
    training = Training()
    weights, memory = [], []
    for _ in range(3):
        weights.append(training.step())
        shoal.save_checkpoint(tmp_path, keep=3)
        training.saver.close(saving.DISK_PATIENCE)
        memory.append({name: t.data_ptr() for name, t in training.saver._memory.items()})
    assert memory[0]
    assert memory[0] == memory[1] == memory[2]
    for step, then in enumerate(weights, start=1):
        assert torch.equal(read_model(tmp_path / f"step-{step}")["weight"], then)


def test_copy_still_being_written_keeps_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second save does not wait for the first one to be written. That save must fail, and the
    first checkpoint must have the values of its own step."""
    training = Training()
    go, write = threading.Event(), saving.write_checkpoint

    def stuck(*args: object, **kwargs: object) -> object:
        assert go.wait(60)
        return write(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(saving, "write_checkpoint", stuck)
    monkeypatch.setattr(saving.CheckpointSaver, "settle_together", lambda *_: None)
    weights = training.step()
    shoal.save_checkpoint(tmp_path, keep=3)
    training.step()
    with pytest.raises(DeadlineError, match="step-1"):
        shoal.save_checkpoint(tmp_path, keep=3)
    training.step()
    go.set()
    training.saver.close(saving.DISK_PATIENCE)
    assert torch.equal(read_model(tmp_path)["weight"], weights)
