"""Table that adapts to the width of the terminal. If the terminal is too narrow for all columns,
the least important ones are omitted; no name is truncated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_GAP: Final = 2


@dataclass(frozen=True)
class Column:
    """A column: its name and one cell per row."""

    name: str
    cells: Sequence[str | Text]
    dispensable: int = 0
    """Priority for dropping the column if not all columns fit: the largest number is dropped first.
    0: the column is never dropped."""
    right: bool = True
    """True to right-align the cells, as for numbers."""

    @property
    def width(self) -> int:
        return max(
            cell_len(each if isinstance(each, str) else each.plain)
            for each in (self.name, *self.cells)
        )


class FittingTable:
    """Rich renderable that shows a table and omits columns that do not fit."""

    def __init__(self, *columns: Column) -> None:
        """`columns`: columns with the same number of cells."""
        self._columns = columns

    def shown(self, width: int) -> list[Column]:
        """Returns the columns that fit on a terminal of `width` characters, in order."""
        chosen = list(self._columns)
        while sum(column.width for column in chosen) + _GAP * (len(chosen) - 1) > width:
            least = max(chosen, key=lambda column: column.dispensable)
            if not least.dispensable:
                break  # rich truncates the remaining columns
            chosen.remove(least)
        return chosen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        columns = self.shown(options.max_width)
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
        for column in columns:
            table.add_column(column.name, justify="right" if column.right else "left", no_wrap=True)
        for row in zip(*(column.cells for column in columns), strict=True):
            table.add_row(*row)
        yield table

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)
