"""The Lightning script of docs/guides/trainers.md, word by word, trains on two workers, saves, and
writes the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.sessions import Session, blocks_of

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "trainers.md"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_script_for_lightning_trains_and_writes_the_model(session: Session) -> None:
    session.follow(blocks_of(PAGE))
    assert (session.directory / "checkpoints" / "step-24").is_dir()
    assert (
        "layers.0.weight"
        in torch.load(session.directory / "model.ckpt", weights_only=True)["state_dict"]
    )
