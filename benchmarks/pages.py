"""Writes measured figures to the pages of the documentation: `python -m benchmarks --docs docs`.

`docs/benchmarks/tables.md` has a section for each table, and its folder contains the plots. Other
pages show single tables between the lines `<!-- figures: t8 -->` and `<!-- end of figures -->`.
With `<!-- figures: all -->`, as in `docs/benchmarks.md`, a page shows one line per table, with its
target and the result. If a table was not measured this time, its section, plot and lines stay as
they are. This module measures nothing.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.errors import MeasurementError
from benchmarks.report import Table, grid, markdown, read

_PAGE: Final = "tables.md"
_ALL: Final = "all"
_PLOTS: Final = "benchmarks"
_HEADINGS: Final = re.compile(r"^## ([\w-]+): ", re.MULTILINE)
_INSERTED: Final = re.compile(
    r"(<!-- figures: ([\w-]+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL
)
_HEADER: Final = """\
# All tables

Each table compares Shoal with other systems, measured on one machine in alternation. It names the
machine, the command, and the load before the measurement. Tables may have been measured on
different days. [Figures](../benchmarks.md) shows the most important results. `make bench` measures
all tables (two and a half hours on two quiet cores; T13 alone takes one hour), and
`python -m benchmarks t2` measures one of them. `python -m benchmarks --docs docs` puts new
results into this page. [Where the time goes](where-the-time-goes.md) records how Shoal's overhead
was measured and reduced.
"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measured table, as read from its files, and the path of its plot."""

    table: Table
    section: str
    """The table as a section of a page, in Markdown."""
    plot: Path


def write_pages(measured: Path, docs: Path, keys: Sequence[str]) -> list[Path]:
    """Writes the page of all tables, the plots, and the tables that other pages show. Returns the
    changed files.

    Args:
        measured: directory with the measured tables.
        docs: directory of the documentation.
        keys: keys of all tables, in the order in which they are shown.

    Raises:
        MeasurementError: `measured` contains no table, or a page shows a table that was never
            measured.
    """
    tables = {key: _load(measured, key) for key in keys if (measured / f"{key}.json").exists()}
    if not tables:
        raise MeasurementError(f"no table in {measured}: run `python -m benchmarks` first")
    (docs / _PLOTS).mkdir(exist_ok=True)
    page = docs / _PLOTS / _PAGE
    changed = [page]
    for key, each in tables.items():
        if each.plot.exists():
            changed.append(Path(shutil.copyfile(each.plot, docs / _PLOTS / f"{key}.png")))
    sections = _sections(page.read_text()) if page.exists() else {}
    sections |= {key: _section(key, each) for key, each in tables.items()}
    page.write_text("\n".join([_HEADER, *(sections[key] for key in keys if key in sections)]))
    for other in sorted(docs.rglob("*.md")):
        text = other.read_text()
        filled = _filled(text, tables, other, keys)
        if filled != text:
            other.write_text(filled)
            changed.append(other)
    return changed


def _sections(page: str) -> dict[str, str]:
    """Splits the page of all tables into sections. Returns the sections by the key of the table."""
    begins = [*_HEADINGS.finditer(page)]
    ends = [*(each.start() for each in begins[1:]), len(page)]
    return {
        begin[1].lower(): page[begin.start() : end].rstrip() + "\n"
        for begin, end in zip(begins, ends, strict=True)
    }


def _load(measured: Path, key: str) -> Measured:
    table, machine, command = read(measured / f"{key}.json")
    return Measured(
        table=table, section=markdown(table, machine, command), plot=measured / f"{key}.png"
    )


def _section(key: str, each: Measured) -> str:
    return each.section + (f"\n![{key}]({key}.png)\n" if each.plot.exists() else "")


def _filled(text: str, tables: Mapping[str, Measured], page: Path, keys: Sequence[str]) -> str:
    def fill(match: re.Match[str]) -> str:
        return match[1] + _grid(match[2], match[3], tables, page, keys) + match[4]

    return _INSERTED.sub(fill, text)


def _grid(
    key: str, before: str, tables: Mapping[str, Measured], page: Path, keys: Sequence[str]
) -> str:
    """Returns the lines to show on a page for one table, or a summary of all tables. `before`:
    lines that the page shows at present; they are kept for tables that were not measured."""
    if key == _ALL:
        head, rows = summary({each: measured.table for each, measured in tables.items()})
        shown = {row[3 : row.index("]")].lower(): row for row in before.splitlines()[len(head) :]}
        shown |= rows
        return "\n".join([*head, *(shown[each] for each in keys if each in shown)]) + "\n"
    if key in tables:
        return "\n".join(grid(tables[key].table)) + "\n"
    if not before:
        raise MeasurementError(
            f"{page} shows table {key}, which was not measured: run `python -m benchmarks {key}` "
            "first"
        )
    return before


def summary(tables: Mapping[str, Table]) -> tuple[list[str], dict[str, str]]:
    """Returns the summary of all tables that have a target, as a Markdown table with targets and
    results: its two heading lines, and the lines below, by table key."""
    head = ["|  | what | target | measured |", "|---|---|---|---|"]
    rows = {}
    for key, table in tables.items():
        if not table.target.startswith("none"):
            measured = (
                table.verdict.removeprefix("Measured: ")
                .removeprefix("Measured, ")
                .removesuffix(".")
            )
            anchor = slug(f"{table.key.upper()}: {table.title}")
            rows[key] = (
                f"| [{key.upper()}]({_PLOTS}/{_PAGE}#{anchor}) | {table.title} | {table.target} | "
                f"{measured} |"
            )
    return head, rows


def slug(heading: str) -> str:
    """Returns the anchor that GitHub and the documentation site give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
