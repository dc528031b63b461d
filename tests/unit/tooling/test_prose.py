"""Pages can be read in an editor and at first reading: no line of their prose is longer than 100
columns, and no sentence longer than 35 words."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_COLUMNS = 100
_WORDS = 35
_GENERATED = ("docs/reference/", "docs/parity.md", "docs/benchmarks/tables.md")
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


def prose_of(page: str) -> Iterator[tuple[int, str]]:
    """Yields the paragraphs and list items of a page with the numbers of their first lines, without
    tables, headings and code."""
    fence, began, lines = "", 0, list[str]()
    for number, line in enumerate([*page.splitlines(), ""], 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        item = re.match(r"\s*([-*]|\d+\.) ", line)
        outside = bool(fence or mark or not line.strip() or _UNBREAKABLE.match(line))
        if lines and (outside or item):
            yield began, " ".join(lines)
            lines = []
        if mark and (not fence or line.strip() == fence):
            fence = "" if fence else mark[1]
        code = line.startswith("    ") and not lines and not item
        if not outside and not code:
            began = began if lines else number
            lines.append(line.strip().removeprefix(item[0].strip() if item else ""))


def long_sentences(page: str) -> list[tuple[int, str]]:
    """Returns the sentences of a page's prose that have more than `_WORDS` words, with the numbers
    of the lines in which their paragraphs begin. Code in backticks counts as one word."""
    found = []
    for number, text in prose_of(page):
        words = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]+`", "`code`", text))
        found += [
            (number, sentence)
            for sentence in re.split(r"(?<=[.!?])[\"*)]*\s+", words)
            if len(sentence.split()) > _WORDS
        ]
    return found


def _pages() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=_ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return [page for page in listed if not page.startswith(_GENERATED)]


def test_lines_of_prose_have_at_most_100_columns() -> None:
    found = [
        f"{page}:{number}" for page in _pages() for number in too_long((_ROOT / page).read_text())
    ]
    assert not found, "break these lines: " + ", ".join(found)


def test_sentences_of_pages_have_at_most_35_words() -> None:
    found = [
        f"{page}:{number}: {sentence[:80]} ..."
        for page in _pages()
        for number, sentence in long_sentences((_ROOT / page).read_text())
    ]
    assert not found, "split these sentences:\n" + "\n".join(found)


def test_only_prose_counts() -> None:
    long = "word " * 30
    assert too_long(f"{long}\n\n- {long}\n") == [1, 3]
    assert too_long(f"```console\n{long}\n```\n| {long} |\n# {long}\n\n    {long}\n") == []
    assert too_long("x" * 120) == []


def test_only_sentences_of_prose_count() -> None:
    long = "word " * 36
    assert [line for line, _ in long_sentences(f"{long}.\n\n- {long}.\n  {long}.\n")] == [1, 3, 3]
    assert long_sentences(f"{long[:100]}. `{long}` [{long[:50]}](x).\n") == []
    assert long_sentences(f"```text\n{long}\n```\n| {long} |\n# {long}\n\n    {long}\n") == []
