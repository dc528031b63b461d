"""Writes the documentation's figures from what was measured: `python -m benchmarks --docs docs`.

`docs/benchmarks/tables.md` has a section for each table, with a plot beside the page. Other pages
show single tables between the lines `<!-- figures: t8 -->` and `<!-- end of figures -->`.
`<!-- figures: all -->`, as in `docs/benchmarks.md`, becomes one line per table with its target and
the result. Tables that were not measured this time keep their section, plot and lines. Nothing is
measured here.
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
    """One table as it was written, and its plot."""

    table: Table
    section: str
    """Markdown."""
    plot: Path


def write_pages(measured: Path, docs: Path, keys: Sequence[str]) -> list[Path]:
    """Writes the page, the plots, and the tables that other pages show. Returns the changed files.
    `keys`: all tables, in their order.

    Raises:
        MeasurementError: `measured` has no table, or a page shows a table that was never measured.
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
    """Returns the sections of the page, by the keys of their tables."""
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
    """Returns the lines that a page shows of one table, or of all tables. `before`: the lines that
    it has shown so far."""
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
    """Returns the Markdown table of all tables that have a target, with the target and the result:
    the two heading lines, and the other lines by their tables' keys."""
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
