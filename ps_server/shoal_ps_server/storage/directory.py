"""Data directory of a server: a snapshot, and the journal of changes after the snapshot. Only one
server at a time may use a directory.

The contents belong to one run of the job, which the file `run` names. State of past runs is moved
to folders such as `run-3`.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from shoal_common.errors import ConfigurationError, CorruptDataError
from shoal_common.formats.runs import Run

from shoal_ps_server.storage.image import ServerImage
from shoal_ps_server.storage.recovery import Recovered, recover
from shoal_ps_server.storage.segments import (
    JOURNAL_PREFIX,
    Owner,
    Segments,
    sync_directory,
    sync_file,
)
from shoal_ps_server.storage.snapshot import read_snapshot

_SNAPSHOT: Final = "snapshot.safetensors"
_LOCK: Final = "lock"
_CLEARING: Final = "clearing"
"""Name of a file. While it exists, all other files in the directory are ignored."""
_RUN: Final = "run"
_ASIDE: Final = "run-"
_SETTING_ASIDE: Final = "setting-aside"
"""Name of a file that contains the name of the folder to which the contents are being moved."""
RUNS_KEPT: Final = 4
"""Maximum number of folders of past runs. It exceeds the number of restarts of a failing job in
compose.yaml, so that restarts do not displace older state."""


class DataDirectory:
    """An open and locked data directory. A context manager. The lock is released when the process
    exits for any reason."""

    def __init__(self, path: Path) -> None:
        """Creates the directory if necessary, and locks it. Raises ConfigurationError if it is
        unusable or another server uses it."""
        self.path = path
        self.run: Run | None = None
        """Run that the contents of the directory belong to; None if it is empty."""
        self._segments: Segments | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigurationError(
                f"data_dir={path}: {error}; use a writable directory"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigurationError(
                f"data_dir={path} is in use by another server; use a separate directory for each "
                "server"
            ) from error
        self._finish_setting_aside()
        self.run = self._read_run()
        if self.run is None:
            self._write(_RUN, "")

    @property
    def snapshot(self) -> Path:
        """Path of the snapshot, whether or not it exists."""
        return self.path / _SNAPSHOT

    def read(self, *, job_id: str, server_id: str) -> ServerImage | None:
        """Returns the snapshot of this job and server; None if there is none. After a successful
        read, removes temporary files left behind by a killed server.

        Raises CorruptDataError like `read_snapshot`, and ConfigurationError / SNAPSHOT_FOREIGN for
        the snapshot of a different job or server.
        """
        image = read_snapshot(self.snapshot)
        if image is not None and (image.state.job_id, image.state.server_id) != (job_id, server_id):
            raise ConfigurationError(
                f"data_dir={self.path} belongs to server {image.state.server_id!r} of job "
                f"{image.state.job_id!r}, not to server {server_id!r} of job {job_id!r}; use "
                "another directory",
                reason="SNAPSHOT_FOREIGN",
            )
        for leftover in self.path.glob(f"{_SNAPSHOT}.*.tmp"):
            leftover.unlink(missing_ok=True)
        return image

    def recover(self, *, job_id: str, server_id: str) -> Recovered:
        """Returns the state that the server had when its previous process ended, even if that
        process was killed. Raises the errors of `read` and `recovery.recover`."""
        if (self.path / _CLEARING).exists():
            self._remove_all()
        image = self.read(job_id=job_id, server_id=server_id)
        self._segments = Segments(self.path, Owner(job_id=job_id, server_id=server_id))
        try:
            self._segments.open()
            return recover(self._segments, image)
        except OSError as error:
            raise ConfigurationError(
                f"data_dir={self.path}: {error}; check its disk and permissions"
            ) from error

    def clear(self, *, job_id: str, server_id: str) -> None:
        """Removes the snapshot and the journal, because another server's state will replace them,
        and starts a new journal. If this raises OSError, the next start of the server removes the
        remaining files."""
        (self.path / _CLEARING).touch()
        sync_directory(self.path)
        self._remove_all()
        self._segments = Segments(self.path, Owner(job_id=job_id, server_id=server_id))
        self._segments.open()

    def note_run(self, run: Run) -> None:
        """Records on disk that the contents belong to `run` from now on. Must be called before
        anything is written for that run. Raises ConfigurationError."""
        if run == self.run:
            return
        try:
            self._write(_RUN, f"{run}\n")
        except OSError as error:
            raise ConfigurationError(
                f"data_dir={self.path}: {error}; free some space on its disk"
            ) from error
        self.run = run

    def set_aside(self) -> Path | None:
        """Moves the contents to a separate folder and returns its path. Only the newest of these
        folders are kept. Raises ConfigurationError.

        Returns None if there were no contents. A run that ends before training starts therefore
        leaves no folder; otherwise a few restarts of a container would displace all older folders.
        """
        number = 1 if self.run is None else self.run.number
        names = (
            f"{_ASIDE}{number}" + (f".{again}" if again else "") for again in itertools.count()
        )
        name = next(name for name in names if not (self.path / name).exists())
        try:
            if self._holds_nothing():
                (self.path / _CLEARING).touch()
                self._write(_RUN, "")
                self._remove_all()
                self.run, self._segments = None, None
                return None
            self._write(_SETTING_ASIDE, name)
            self._finish_setting_aside()
            self._write(_RUN, "")
            older = sorted(
                self.path.glob(f"{_ASIDE}*"), key=lambda folder: folder.stat().st_mtime_ns
            )
            for folder in older[:-RUNS_KEPT]:
                shutil.rmtree(folder)
        except OSError as error:
            raise ConfigurationError(
                f"data_dir={self.path}: {error}; check its disk and permissions"
            ) from error
        self.run, self._segments = None, None
        return self.path / name

    def _holds_nothing(self) -> bool:
        """Returns whether the directory contains neither a snapshot nor a change. Must not be
        called before `recover`."""
        if self.snapshot.exists() or self._segments is None:
            return False
        try:
            return next(self._segments.records(0), None) is None
        except CorruptDataError:
            return False

    def _finish_setting_aside(self) -> None:
        """Completes a `set_aside` that was interrupted because the server died."""
        marker = self.path / _SETTING_ASIDE
        if not marker.exists():
            return
        folder = self.path / marker.read_text().strip()
        folder.mkdir(exist_ok=True)
        for name in (*self._names(), _RUN):
            if (self.path / name).exists():
                (self.path / name).rename(folder / name)
        sync_directory(folder)
        sync_directory(self.path)
        marker.unlink()

    def _read_run(self) -> Run | None:
        """Returns the run that the contents belong to. Older releases did not record it; their
        contents belong to the first run of the job."""
        if not (self.path / _RUN).exists():
            return (
                Run(number=1)
                if any((self.path / name).exists() for name in self._names())
                else None
            )
        text = (self.path / _RUN).read_text().strip()
        return Run.parse(text, what=str(self.path / _RUN)) if text else None

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f"{name}.tmp"
        temporary.write_text(text)
        sync_file(temporary)
        temporary.rename(self.path / name)
        sync_directory(self.path)

    def _names(self) -> list[str]:
        return [_SNAPSHOT, *(path.name for path in self.path.glob(f"{JOURNAL_PREFIX}*"))]

    def _remove_all(self) -> None:
        for name in self._names():
            (self.path / name).unlink(missing_ok=True)
        sync_directory(self.path)
        (self.path / _CLEARING).unlink(missing_ok=True)

    @property
    def segments(self) -> Segments:
        """Files of the journal. Must not be read before `recover`."""
        assert self._segments is not None, "recover() comes first"
        return self._segments

    def forget_journal_before(self, number: int) -> None:
        """Removes the journal files before file `number`, because a snapshot contains their
        changes. Raises OSError."""
        self.segments.forget_before(number)

    def close(self) -> None:
        """Releases the lock on the directory. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
