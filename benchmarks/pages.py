"""Writes the documentation's figures from what was measured: `python -m benchmarks --docs docs`.

`docs/benchmarks/tables.md` and the plots beside it are made whole: all tables, as they were
measured. Other pages take single tables: between the lines `<!-- figures: t8 -->` and
`<!-- end of figures -->` stands what this module puts there. `<!-- figures: all -->` takes a line
for each table, with its target and what was reached: so does `docs/benchmarks.md`, the page to look
at. Nothing is measured here.
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
_INSERTED: Final = re.compile(
    r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL
)
_HEADER: Final = """\
# All tables

Each table compares Shoal with other systems, measured on one machine in alternation. It names the
machine, the command, and the load before the measurement. Tables may have been measured on
different days. [Figures](../benchmarks.md) shows the most important results. `make bench` measures
all tables (about two and a half hours on two quiet cores, of which T13 takes one), and
`python -m benchmarks t2` measures one of them. `python -m benchmarks --docs docs` writes this page
from the newest results. [Where the time goes](where-the-time-goes.md) records how Shoal's overhead
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
    """Writes the page, the plots, and the tables that other pages take; the changed files. Tables
    that were not measured are left out.

    Raises:
        MeasurementError: there is nothing in `measured`, or a page takes a table that is not there.
    """
    tables = {key: _load(measured, key) for key in keys if (measured / f"{key}.json").exists()}
    if not tables:
        raise MeasurementError(f"no table in {measured}: run `python -m benchmarks` first")
    (docs / _PLOTS).mkdir(exist_ok=True)
    changed = [docs / _PLOTS / _PAGE]
    for key, each in tables.items():
        if each.plot.exists():
            changed.append(Path(shutil.copyfile(each.plot, docs / _PLOTS / f"{key}.png")))
    (docs / _PLOTS / _PAGE).write_text(
        "\n".join([_HEADER, *(_section(key, each) for key, each in tables.items())])
    )
    for page in sorted(docs.rglob("*.md")):
        text = page.read_text()
        filled = _filled(text, tables, page)
        if filled != text:
            page.write_text(filled)
            changed.append(page)
    return changed


def _load(measured: Path, key: str) -> Measured:
    table, machine, command = read(measured / f"{key}.json")
    return Measured(
        table=table, section=markdown(table, machine, command), plot=measured / f"{key}.png"
    )


def _section(key: str, each: Measured) -> str:
    return each.section + (f"\n![{key}]({key}.png)\n" if each.plot.exists() else "")


def _filled(text: str, tables: dict[str, Measured], page: Path) -> str:
    return _INSERTED.sub(lambda match: match[1] + _grid(match[2], tables, page) + match[3], text)


def _grid(key: str, tables: dict[str, Measured], page: Path) -> str:
    if key == _ALL:
        return (
            "\n".join(summary({each: measured.table for each, measured in tables.items()})) + "\n"
        )
    if key not in tables:
        raise MeasurementError(
            f"{page} takes table {key}, which was not measured: run `python -m benchmarks {key}` "
            "first"
        )
    return "\n".join(grid(tables[key].table)) + "\n"


def summary(tables: Mapping[str, Table]) -> list[str]:
    """The lines of a Markdown table of all tables that have a target: what was to be reached, and
    what was."""
    lines = ["|  | what | target | measured |", "|---|---|---|---|"]
    for key, table in tables.items():
        if not table.target.startswith("none"):
            measured = (
                table.verdict.removeprefix("Measured: ")
                .removeprefix("Measured, ")
                .removesuffix(".")
            )
            anchor = slug(f"{table.key.upper()}: {table.title}")
            lines.append(
                f"| [{key.upper()}]({_PLOTS}/{_PAGE}#{anchor}) | {table.title} | {table.target} | "
                f"{measured} |"
            )
    return lines


def slug(heading: str) -> str:
    """The anchor that GitHub and the site give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
