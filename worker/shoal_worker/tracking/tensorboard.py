"""TensorBoard's event files: scalars and texts of a run, in one directory.

Each opening makes a file of its own: the rank that writes may be another by then. TensorBoard shows
all files of a directory as one run. What a file begins with makes void what older ones have of its
first step and of later ones, so steps that were done again appear once. Ranks on several machines
need a directory that all of them see, else each machine has its part.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from shoal_common.errors import ConfigurationError

from shoal_worker.tracking.tracker import TrackedRun

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class TensorBoard:
    """Writes a run's course for TensorBoard. Give it to `shoal.track`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """`directory`: of this run alone; `tensorboard --logdir` shows it or a directory of such.
        It is made if it is not there.

        Raises ConfigurationError if the package is not installed.
        """
        if find_spec("tensorboard") is None:
            raise ConfigurationError(
                "shoal.TensorBoard needs the package tensorboard; install it with `pip install "
                "'shoal[tensorboard]'`"
            )
        # it is opened, and by other ranks again, long after this
        self._directory = Path(directory).absolute()
        self._writer: SummaryWriter | None = None

    def open(self, *, run: TrackedRun, step: int) -> None:
        """Begins a file."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._directory.mkdir(parents=True, exist_ok=True)
        self._writer = SummaryWriter(str(self._directory), purge_step=step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A point of each."""
        for name, value in values.items():
            self._opened.add_scalar(name, value, step)

    def event(self, step: int, text: str) -> None:
        """A text, under the tag shoal/events."""
        self._opened.add_text("shoal/events", text, step)

    def flush(self) -> None:
        """Everything is in the file."""
        self._opened.flush()

    def close(self, *, ended: bool) -> None:
        """Ends the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    @property
    def _opened(self) -> SummaryWriter:
        assert self._writer is not None, "it is open while it is written to"
        return self._writer
