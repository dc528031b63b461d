"""docs/tutorial.md, word by word: its scripts, its commands, and their output."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sessions import Session, blocks_of

PAGE = Path(__file__).parents[3] / "docs" / "tutorial.md"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_tutorial_output_matches_the_page_and_a_killed_worker_changes_no_bit(
    session: Session,
) -> None:
    session.follow(blocks_of(PAGE))
    assert any("bit for bit" in said for _, said in session.printed)
    assert any("ended with SIGKILL" in said for _, said in session.printed)
