"""The site of docs/: its reference pages are up to date with the code, and all its pages are in the
navigation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import shoal
from shoal.cli.app import app
from typer.main import get_group

from docsite.__main__ import PAGES, REFERENCE
from docsite.diagrams import DOCS, all_diagrams

ROOT = Path(__file__).parents[3]
VARIABLE = re.compile(r"""["'f](SHOAL_[A-Z][A-Z_]*[A-Z])["'=]""")


@pytest.mark.parametrize("name", PAGES)
def test_page_generated_from_the_code_is_up_to_date(name: str) -> None:
    assert (REFERENCE / name).read_text() == PAGES[name](), "run make reference"


def test_every_command_is_on_the_page() -> None:
    page = (REFERENCE / "commands.md").read_text()
    assert set(re.findall(r"^## shoal (\S+)$", page, re.MULTILINE)) == set(get_group(app).commands)


def test_every_variable_that_the_code_names_is_on_the_page() -> None:
    packages = ("common", "coordinator", "ps_server", "worker", "sdk")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    named = {
        name
        for path in files
        if "demo" not in path.parts
        for name in VARIABLE.findall(path.read_text())
    }
    page = (REFERENCE / "environment.md").read_text()
    inside = {"SHOAL_RAY_DIRECTORY"}  # used between two of Shoal's own processes
    assert len(named) > 20
    assert sorted(name for name in named - inside if f"`{name}`" not in page) == []


def test_the_api_page_has_each_public_name_once() -> None:
    named = re.findall(r"^::: shoal\.(\w+)$", (REFERENCE / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(shoal.__all__)


def test_every_drawn_diagram_is_up_to_date() -> None:
    assert {path.stem for path in (DOCS / "diagrams").glob("*.svg")} == set(all_diagrams()), (
        "run python -m docsite.diagrams"
    )


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    decisions = {page for page in pages if page.startswith("decisions/0")}
    assert pages - decisions - listed == set()


def test_lists_are_separated_from_preceding_text() -> None:
    """A list follows an empty line and is indented by multiples of four spaces. GitHub accepts
    other lists, but the site's Markdown does not."""
    fence = re.compile(r"^(`{3,}).*?^\1`*$", re.DOTALL | re.MULTILINE)
    item = re.compile(r"\s*([-*]|\d+\.) ")
    found = []
    for page in [
        *sorted(DOCS.rglob("*.md")),
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "README.md",
    ]:
        for block in re.split(r"\n\s*\n", fence.sub("", page.read_text())):
            lines = block.strip("\n").split("\n")
            items = [line for line in lines if item.match(line)]
            if items and not item.match(lines[0]) and not lines[0].startswith(("#", "    ")):
                found.append(f"{page.name}: {items[0][:60]}")
            found += [f"{page.name}: {line[:60]}" for line in items if re.match(r" {1,3}\S", line)]
    assert found == []
