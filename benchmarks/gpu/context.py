"""The context of every part of `python -m benchmarks.gpu`: where and how much to measure, and where
to write each row as soon as it is measured."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

from benchmarks.report import Row

COMMAND: Final = "python -m benchmarks.gpu"
NO_TARGET: Final = "none: figures of a device, to be looked at"


@dataclass(frozen=True, kw_only=True)
class Context:
    """One run on one device, or its rehearsal on the host."""

    device: torch.device
    what: str
    """Name of the device in titles."""
    width: int = 1024
    """Width of the small model's layers."""
    steps: int = 50
    """Number of timed steps of the small model, for each way to train."""
    rows: Path | None = None
    """File to which each row is written as a line of JSON once it has been measured. None: rows are
    written only with their table."""

    @property
    def rehearsal(self) -> bool:
        """True for tiny sizes, whose figures are meaningless."""
        return self.device.type == "cpu"

    def settle(self) -> None:
        """Blocks until the device has completed all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def measured(self, part: str, name: str, measure: Callable[[], Row]) -> Row:
        """Returns the result of `measure`, or a row with its error, and writes it to `rows` and to
        standard output.

        Afterwards, the memory that it used is free: an error's traceback would keep a model alive.
        """
        try:
            row = measure()
        except Exception as error:  # of one row: the others are measured all the same
            row = Row(
                name=name,
                command=f"{COMMAND} {part}",
                cells={},
                failure=f"{type(error).__name__}: {error}",
            )
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        cells = ", ".join(f"{column} {text}" for column, text in row.cells.items())
        print(f"FIGURE {part}: {row.name}: {row.failure or cells}", flush=True)
        if self.rows is not None:
            with self.rows.open("a") as file:
                file.write(json.dumps({"part": part, **asdict(row)}) + "\n")
        return row
