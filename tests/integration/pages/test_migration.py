"""The pages of docs/migration are followed word by word: the scripts before and after end with the
same parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.sessions import Session, blocks_of

MIGRATION = Path(__file__).parents[3] / "docs" / "migration"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "page", ["ddp", "accelerate", pytest.param("trainers", marks=pytest.mark.matrix)]
)
def test_scripts_before_and_after_end_with_the_same_parameters(session: Session, page: str) -> None:
    session.follow(blocks_of(MIGRATION / f"{page}.md"))
    before, *others = (
        torch.load(session.directory / f"{name}.pt")
        for name in ("before", "after", *(["loop"] if page == "trainers" else []))
    )
    for after in others:
        torch.testing.assert_close(after, before)


def test_script_migrated_from_deepspeed_trains(session: Session) -> None:
    session.follow(blocks_of(MIGRATION / "deepspeed.md"))
    assert (session.directory / "checkpoints" / "step-24").is_dir()
