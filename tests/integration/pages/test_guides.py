"""Guides that show a terminal: the commands print what the guides show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sessions import Session, blocks_of

GUIDES = Path(__file__).parents[3] / "docs" / "guides"


@pytest.mark.matrix
def test_hang_is_reported_as_in_the_guide(session: Session) -> None:
    session.follow(blocks_of(GUIDES / "hangs.md"))


@pytest.mark.matrix
def test_group_is_formed_again_as_in_the_guide(session: Session) -> None:
    session.follow(blocks_of(GUIDES / "interruptible-groups.md"))
