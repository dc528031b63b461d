"""The context that is passed to each part of `python -m benchmarks.gpu`: the device, the sizes, and
the file to which each row is written as soon as it has been measured."""

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
    """Settings of a run on one device, or of its rehearsal on the host."""

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
        """True if the run is a rehearsal on the host, with tiny sizes and meaningless figures."""
        return self.device.type == "cpu"

    def settle(self) -> None:
        """Blocks until the device has completed all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def measured(self, part: str, name: str, measure: Callable[[], Row]) -> Row:
        """Calls `measure`, and writes its row to `rows` and to standard output. Returns the row, or
        a row with the error if `measure` raises one.

        The memory that `measure` used has been freed when this returns. The error is therefore not
        kept, because its traceback would keep a model alive.
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
