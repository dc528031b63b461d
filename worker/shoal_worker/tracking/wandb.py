"""Weights & Biases sink: records a run's progress as one W&B run.

The W&B run's id is computed from the run's key. A rank that replaces a dead rank, and a resumed
run, therefore continue the same W&B run. W&B cannot delete rows, so repeated steps keep their first
values. To skip these steps, the sink must know the newest step in W&B. It comes from the server.
Without a server (WANDB_MODE=offline), the sink reads it from the directories that W&B created when
the sink was opened before; `wandb sync` joins these directories to one run. Ranks on several
machines need a shared directory for that.

W&B's own process sends the rows, and dies if the rank is killed. It writes received rows to the
run's directory once per second, so that only a few are lost in that case.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shoal_common.errors import ConfigurationError

from shoal_worker.tracking.sinks import Event, Points, Report, TrackedRun

if TYPE_CHECKING:
    from wandb import Run

_OWN: Final = ("id", "resume", "reinit", "resume_from", "fork_from")
"""Arguments of `wandb.init` that determine which W&B run the rows belong to. Users may not set
them."""
_FINISH_S: Final = 20.0
"""Maximum time, in seconds, to wait at the end of a run for W&B to send all rows. The rows remain
in the run's directory, for `wandb sync`."""
_FLUSH: Final = ("x_transaction_log_flush_interval", 1.0)
"""W&B's setting for the interval between writes to the run's directory, in seconds."""
_BLOCK: Final = 32 * 1024
"""Size of a block of W&B's files, which are LevelDB logs of protocol buffers."""
_HEADER: Final = 7
"""Size of the header of such a file, and of the header of each part of a record, in bytes."""
_NEWEST_BLOCKS: Final = 32
"""Number of blocks at the end of a file that are searched for the newest row."""


class WandB:
    """Writes a run's progress to Weights & Biases. Pass it to `shoal.track`."""

    on_every_rank = False

    def __init__(self, project: str, **options: Any) -> None:
        """Creates the sink. `project`: name of the W&B project. `options`: further arguments of
        `wandb.init`, such as `config` or `entity`.

        Raises ConfigurationError if the package is not installed, the name is empty, or an option
        would select a different run.
        """
        if not project:
            raise ConfigurationError("shoal.WandB(''): expected the name of a project")
        own = sorted(set(options).intersection(_OWN))
        if own:
            raise ConfigurationError(
                f"shoal.WandB({own[0]}=...): Shoal selects the W&B run, so that it stays the same "
                f"after faults and resumes; remove {own[0]}"
            )
        try:
            # the import takes seconds, and would later delay steps by holding the interpreter's
            # lock
            import wandb  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(
                "shoal.WandB needs the package wandb; install it with `pip install 'shoal[wandb]'`"
            ) from error
        self._project = project
        self._options = options
        self._run: Run | None = None
        self._newest = 0
        """Newest step that the W&B run had when the sink was opened."""

    def open(self, *, run: TrackedRun, step: int) -> None:
        """Continues the W&B run that belongs to `run`, or creates it."""
        import wandb

        failed, self._run = self._run, None
        if failed is not None:
            failed.finish()
        options = {"name": run.job or None, **self._options}
        settings = wandb.Settings(
            # W&B must not replace the worker's output streams, which belong to the script
            console="off",
            finish_timeout=_FINISH_S,
        )
        if _FLUSH[0] in wandb.Settings.model_fields:
            setattr(settings, *_FLUSH)
        if isinstance(given := options.pop("settings", None), wandb.Settings):
            settings.update_from_settings(given)
        # a W&B run that the script has started with `wandb.init` remains the current run
        opened = wandb.init(
            project=self._project,
            id=run_id(run),
            resume="allow",
            reinit="create_new",
            settings=settings,
            **options,
        )
        # W&B counts rows from 0, and Shoal counts committed steps
        self._newest = opened.step - 1
        if opened.offline:
            self._newest = _newest_step(Path(opened.dir).parents[1], opened.id)
        self._run = opened

    def write(self, reports: Sequence[Report]) -> None:
        """Writes points and events as rows, by step. An event is a line of text in the column of
        its kind, such as shoal/fault."""
        assert self._run is not None, "the sink must be open"
        for report in reports:
            if isinstance(report, Points):
                row: dict[str, Any] = dict(report.values)
            elif isinstance(report, Event):
                row = {f"shoal/{report.kind}": report.text}
            else:
                continue
            if report.step > self._newest:
                self._run.log(row, step=report.step)
            elif isinstance(report, Event):
                # its row has already been written by an earlier attempt
                self._run.summary.update(row)

    def close(self, *, ended: bool) -> None:
        """Closes the W&B run once all rows are sent. If another rank continues the run, it resumes
        this W&B run."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def run_id(run: TrackedRun) -> str:
    """Returns the id of the W&B run: letters and digits that depend only on the run's key."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", run.job).strip("-")[:32]
    digest = hashlib.sha256(run.key.encode()).hexdigest()[:16]
    return f"{readable}-{digest}" if readable else digest


def _newest_step(directory: Path, of_run: str) -> int:
    """Returns the newest step among the rows that W&B recorded offline in `directory`; 0 if there
    are none. `of_run`: id of the W&B run."""
    from wandb.proto.wandb_internal_pb2 import Record

    newest = 0
    for file in directory.glob(f"offline-run-*-{of_run}/run-{of_run}.wandb"):
        for data in _records(file):
            try:
                row = Record.FromString(data).history.item
            except ValueError:  # the file was damaged when the rank was killed
                break
            for item in row:
                if "_step" in (item.key, *item.nested_key):
                    newest = max(newest, json.loads(item.value_json))
    return newest


def _records(file: Path) -> Iterator[bytes]:
    """Yields the complete records in the last blocks of a W&B file. A record is stored in one or
    more pieces of these types: complete record (1), first piece (2), middle piece (3), last piece
    (4)."""
    with file.open("rb") as opened:
        blocks = file.stat().st_size // _BLOCK
        position = max(0, blocks - _NEWEST_BLOCKS) * _BLOCK
        opened.seek(position)
        data = opened.read()
    position = _HEADER if position == 0 else 0  # the file's own header
    record: bytes | None = None
    while position + _HEADER <= len(data):
        if (rest := _BLOCK - position % _BLOCK) < _HEADER:  # too small for a record
            position += rest
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        part = data[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind in (1, 2):
            record = b""
        if record is None or len(part) < length:
            continue
        record += part
        if kind in (1, 4):
            yield record
            record = None
