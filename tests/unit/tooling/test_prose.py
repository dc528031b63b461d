"""Pages can be read in an editor: no line of their prose is longer than 100 columns."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_COLUMNS = 100
_UNBREAKABLE = re.compile(r"\s*(\||#|<|\[\^?[^\]]+\]: )")
"""Rows of tables, headings, HTML and link definitions."""


def too_long(page: str) -> list[int]:
    """Returns the numbers of the lines of prose that are longer than `_COLUMNS` and could be
    broken."""
    found, fence = [], ""
    for number, line in enumerate(page.splitlines(), 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if fence or mark:
            if mark and (not fence or line.strip() == fence):
                fence = "" if fence else mark[1]
            continue
        code = line.startswith("    ") and not line.strip().startswith(("-", "*"))
        breakable = " " in line.strip() and not code and not _UNBREAKABLE.match(line)
        if len(line) > _COLUMNS and breakable:
            found.append(number)
    return found


def test_lines_of_prose_have_at_most_100_columns() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=_ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    generated = ("docs/reference/", "docs/parity.md")
    pages = [page for page in listed if not page.startswith(generated)]
    found = [
        f"{page}:{number}" for page in pages for number in too_long((_ROOT / page).read_text())
    ]
    assert not found, "break these lines: " + ", ".join(found)


def test_only_prose_counts() -> None:
    long = "word " * 30
    assert too_long(f"{long}\n\n- {long}\n") == [1, 3]
    assert too_long(f"```console\n{long}\n```\n| {long} |\n# {long}\n\n    {long}\n") == []
    assert too_long("x" * 120) == []
