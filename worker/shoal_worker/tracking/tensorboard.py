"""TensorBoard's event files: scalars and texts of a run, in one directory.

Each opening of the sink creates a separate file, since another rank may already be writing.
TensorBoard shows all files of a directory as one run. The start of a file invalidates older files
from the file's first step on, so repeated steps appear once. Ranks on several machines need a
shared directory, otherwise each machine has only its own part.
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
    """Writes a run's progress for TensorBoard. Pass it to `shoal.track`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Creates the sink. `directory`: directory for this run only, created if it does not exist.
        `tensorboard --logdir` shows the directory or its parent.

        Raises ConfigurationError if the package is not installed.
        """
        if find_spec("tensorboard") is None:
            raise ConfigurationError(
                "shoal.TensorBoard needs the package tensorboard; install it with `pip install "
                "'shoal[tensorboard]'`"
            )
        # opened long after this, and again by other ranks
        self._directory = Path(directory).absolute()
        self._writer: SummaryWriter | None = None

    def open(self, *, run: TrackedRun, step: int) -> None:
        """Creates a new event file."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._directory.mkdir(parents=True, exist_ok=True)
        self._writer = SummaryWriter(str(self._directory), purge_step=step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a point for each value."""
        for name, value in values.items():
            self._opened.add_scalar(name, value, step)

    def event(self, step: int, text: str) -> None:
        """Writes a text under the tag shoal/events."""
        self._opened.add_text("shoal/events", text, step)

    def flush(self) -> None:
        """Writes all reports to the file."""
        self._opened.flush()

    def close(self, *, ended: bool) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    @property
    def _opened(self) -> SummaryWriter:
        assert self._writer is not None, "the sink must be open"
        return self._writer
