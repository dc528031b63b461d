"""The animated terminal on README and the site's home page is generated from its recorded lines, is
small, and is legible without animation."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docsite.recording import LINES, PICTURE, Line, draw, read

_ROOT = Path(__file__).parents[3]
_TEXT = "{http://www.w3.org/2000/svg}text"


def test_the_picture_is_drawn_from_the_recorded_lines() -> None:
    assert PICTURE.read_text() == draw(read()), "run python -m docsite.recording"


def test_the_recorded_run_lost_a_worker_and_completed() -> None:
    texts = [line.text for line in read()]
    for part in ("$ shoal kill 1", "killed rank 1", "is lost", "continued from step", "joined"):
        assert any(part in text for text in texts), part
    assert texts[-1].startswith("shoal: run completed; recovered from 1 worker failure")
    assert [line.second for line in read()] == sorted(line.second for line in read())
    assert str(_ROOT) not in LINES.read_text()


def test_picture_is_small_and_has_all_lines_an_alternative_text_and_a_static_form() -> None:
    source = PICTURE.read_text()
    assert len(source.encode()) < 150_000
    svg = ElementTree.fromstring(source)
    shown = " ".join((element.text or "").strip() for element in svg.iter(_TEXT))
    for line in read():
        assert line.text in shown
    assert svg.find("{http://www.w3.org/2000/svg}desc") is not None
    assert "@media (prefers-reduced-motion:reduce){.l{animation:none}}" in source
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", source)


def test_lines_appear_in_order_and_long_ones_are_wrapped() -> None:
    svg = draw([Line(0, 0, "$ a"), Line(0.01, 0, "bb " * 40), Line(60, 1, "<c>")])
    appear = [float(part) for part in re.findall(r"0%,([\d.]+)%\{opacity:0\}", svg)]
    assert len(appear) == 2
    assert 0 < appear[0] < appear[1] < 100
    rows = re.findall(r">( *bb[b ]*)</text>", svg)
    assert [row.count("bb") for row in rows] == [29, 11]
    assert max(map(len, rows)) <= 88
    assert "&lt;c&gt;" in svg


@pytest.mark.parametrize("page", ["README.md", "docs/README.md"])
def test_pages_show_the_picture_with_an_alternative_text(page: str) -> None:
    text = (_ROOT / page).read_text()
    found = re.search(r"!\[([^\]]{60,})\]\(([\w/]*kill\.svg)\)", text)
    assert found is not None
    assert (_ROOT / page).parent / found[2] == PICTURE
