"""The results of a benchmark, and their presentation: on the terminal, as JSON with every sample,
and as Markdown.

This module neither measures nor judges. A row contains measurements, or the reason why there are
none.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table as Grid

from benchmarks.processes import REPOSITORY, STAGE_PREFIX

MISSING = "-"
_COLUMNS: Final = 100
"""Maximum length of a line of prose in a page."""
_STAGE_DIRECTORY: Final = re.compile(rf"{re.escape(tempfile.gettempdir())}/{STAGE_PREFIX}\w+/")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system under one set of settings."""

    name: str
    command: str
    """The command that was started, as a user would type it."""
    cells: Mapping[str, str]
    """Column -> text. The unit is in the column's name or in the text. A column without an entry is
    shown as missing."""
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """All individual measurements, for the JSON and the plots. The names include the unit, as in
    `pause_s`."""
    failure: str = ""
    """Reason for missing figures; empty if none are missing."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Result of one benchmark."""

    key: str
    """Short name of the table: t1, t2, ..."""
    title: str
    target: str
    method: str
    """Description of the measurement, in a few sentences."""
    columns: tuple[str, ...]
    """Columns in the order in which they are shown, after the row's name."""
    rows: tuple[Row, ...]
    verdict: str
    """Comparison with the target, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine on which the figures were measured."""

    cores: int
    processor: str
    memory_gib: float
    system: str
    python: str
    versions: Mapping[str, str]
    load_average: float
    """Load average over the minute before the first measurement. A value well above 0 shows that
    the machine was also doing other work."""

    @classmethod
    def here(cls) -> Machine:
        """Returns this machine in its current state."""
        return cls(
            cores=len(os.sched_getaffinity(0)),
            processor=_processor(),
            memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            system=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            versions={name: metadata.version(name) for name in ("torch", "grpcio", "shoal")},
            load_average=round(os.getloadavg()[0], 2),
        )

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.cores} cores ({self.processor}), {self.memory_gib} GiB, {self.system}, Python "
            f"{self.python}, {versions}; load average before: {self.load_average}"
        )


def show(console: Console, table: Table) -> None:
    """Prints the table."""
    shown = Grid(
        title=f"{table.key.upper()}  {table.title}",
        caption=table.verdict,
        title_justify="left",
        caption_justify="left",
    )
    for column in ("", *table.columns):
        shown.add_column(column, justify="left" if not column else "right")
    for row in table.rows:
        shown.add_row(row.name, *(row.cells.get(column, MISSING) for column in table.columns))
    console.print(shown)
    for row in table.rows:
        if row.failure:
            console.print(f"{row.name}: {_first_line(row.failure)}", markup=False)


def write(directory: Path, table: Table, machine: Machine, command: str) -> None:
    """Writes `<key>.json` and `<key>.md`. `command`: the command that produced the table."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {
        "command": command,
        "machine": dataclasses.asdict(machine),
        **dataclasses.asdict(table),
    }
    (directory / f"{table.key}.json").write_text(json.dumps(content, indent=1) + "\n")
    (directory / f"{table.key}.md").write_text(markdown(table, machine, command))


def read(file: Path) -> tuple[Table, Machine, str]:
    """Returns a table, the machine and the command, from a JSON file that `write` has written."""
    content = json.loads(file.read_text())
    command, machine = content.pop("command"), Machine(**content.pop("machine"))
    rows = tuple(Row(**row) for row in content.pop("rows"))
    return Table(**content | {"columns": tuple(content["columns"]), "rows": rows}), machine, command


def markdown(table: Table, machine: Machine, command: str) -> str:
    """Returns the table as a section of a Markdown page."""
    lines = [
        f"## {table.key.upper()}: {table.title}",
        "",
        _filled(f"Target: {table.target}. {table.verdict}"),
        "",
        _filled(f"`{command}` on {machine}"),
        "",
        _filled(table.method),
        "",
        *grid(table),
        "",
        *(_filled(f"- {row.name}: `{row.command}`", indent="  ") for row in table.rows),
        *(
            _filled(f"- {row.name} failed: {_first_line(row.failure)}", indent="  ")
            for row in table.rows
            if row.failure
        ),
    ]
    return "\n".join(lines) + "\n"


def grid(table: Table) -> list[str]:
    """Returns the rows and columns as the lines of a Markdown table."""
    return [
        f"| {' | '.join(['', *table.columns])} |",
        f"|{'|'.join(['---', *('--:' for _ in table.columns)])}|",
        *(
            f"| {' | '.join([row.name, *(row.cells.get(c, MISSING) for c in table.columns)])} |"
            for row in table.rows
        ),
    ]


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text,
        _COLUMNS,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _first_line(text: str) -> str:
    """Returns the first line of a text. Paths of this machine are shortened in it, because reports
    are published."""
    line = text.strip().split("\n", 1)[0]
    for place in (str(Path(sys.executable).parent), sys.prefix, str(REPOSITORY)):
        line = line.replace(f"{place}/", "")
    return _STAGE_DIRECTORY.sub("", line)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
