"""TensorBoard sink: writes a run's numbers (as scalars) and events (as text) to event files in one
directory.

The sink creates a new file each time it is opened, because the previous file may belong to a
different rank. TensorBoard shows all files in a directory as one run. Each file tells TensorBoard
to ignore older data from the file's first step on, so repeated steps appear once, with their last
values. Ranks on several machines need a shared directory; otherwise each machine has only the steps
that its own ranks have written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal_common.errors import ConfigurationError

from shoal_worker.object_storage import local_directory
from shoal_worker.tracking.sinks import Event, Points, Report, TrackedRun

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class TensorBoard:
    """Writes a run's progress for TensorBoard. Pass it to `shoal.track`."""

    on_every_rank = False

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Creates the sink. `directory`: directory for this run only, created if it does not exist.
        `tensorboard --logdir` shows the directory or its parent.

        Raises ConfigurationError if the package is not installed, or `directory` is a URL.
        """
        place = local_directory(directory, "shoal.TensorBoard:")
        try:
            # the import takes seconds, and would later delay steps by holding the interpreter's
            # lock
            import tensorboard  # noqa: F401
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(
                "shoal.TensorBoard needs the package tensorboard; install it with `pip install "
                "'shoal[tensorboard]'`"
            ) from error
        # the file is opened much later, and other ranks may open files too
        self._directory = place.absolute()
        self._writer: SummaryWriter | None = None

    def open(self, *, run: TrackedRun, step: int) -> None:
        """Creates a new event file."""
        from torch.utils.tensorboard.writer import SummaryWriter

        failed, self._writer = self._writer, None
        if failed is not None:
            with contextlib.suppress(Exception):  # `write` has raised the error
                failed.close()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._writer = SummaryWriter(str(self._directory), purge_step=step)

    def write(self, reports: Sequence[Report]) -> None:
        """Writes points as scalars, and events as text under the tag shoal/events."""
        writer = self._writer
        assert writer is not None, "the sink must be open"
        for report in reports:
            match report:
                case Points():
                    for name, value in report.values.items():
                        writer.add_scalar(name, value, report.step, walltime=report.time_ns / 1e9)
                case Event():
                    writer.add_text(
                        "shoal/events",
                        f"{report.kind}: {report.text}",
                        report.step,
                        walltime=report.time_ns / 1e9,
                    )
        writer.flush()

    def close(self, *, ended: bool) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
