from __future__ import annotations

from pathlib import Path

from tests.parity.table import page

_PAGE = Path(__file__).parents[2] / "docs" / "parity.md"


def test_committed_table_matches_the_cells() -> None:
    assert _PAGE.read_text() == page(), "run make parity"
