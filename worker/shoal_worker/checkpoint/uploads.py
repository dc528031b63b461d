"""Uploads a run's checkpoints from a local directory to an object store, in the background.

The saver writes checkpoints to the local directory. The complete checkpoints that are not uploaded
yet form the backlog. The rank that completes the checkpoints uploads them, oldest first. The
backlog is limited by the number of checkpoints kept in the directory (`keep`): a checkpoint is not
uploaded if a later save removes it before its upload begins.

Threads: the writer's thread calls `changed`; the training thread calls `check`, `wait` and
`backlog`. The upload thread owns the connection to the object store. `_condition` guards the fields
that they share. The upload uses hard links to the files, so a save may remove or replace the
checkpoint during its upload. The thread is a daemon, so an upload that hangs does not keep the
process alive.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from shoal_common.errors import (
    ConfigurationError,
    CorruptDataError,
    DeadlineError,
    PermissionDeniedError,
    ShoalError,
    StaleGenerationError,
    UnavailableError,
)

from shoal_worker.backends.inmemory.turns import run_aside
from shoal_worker.checkpoint.files import complete_in
from shoal_worker.checkpoint.frozen import link
from shoal_worker.checkpoint.manifest import digest_of, make_temporary, remove
from shoal_worker.checkpoint.remote import RemoteCheckpoints
from shoal_worker.elastic.group.waiting import WaitingLines
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.object_storage import ObjectFolder

_log = logging.getLogger(__name__)

PATIENCE: Final = timedelta(minutes=30)
"""Maximum time that the end of a run waits for uploads."""
_LOOK: Final = timedelta(seconds=0.5)
_UPLOADED: Final = ".uploaded"
"""File that contains the name of the checkpoint uploaded last."""


@dataclass(frozen=True)
class Backlog:
    """Checkpoints that are complete on the local disk and not yet in the object store."""

    checkpoints: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        plural = "" if self.checkpoints == 1 else "s"
        return f"{self.checkpoints} checkpoint{plural}, {self.nbytes / 1e6:.1f} MB"


def is_uploaded(path: Path) -> bool:
    """Returns whether a process on this machine has uploaded the checkpoint at `path`."""
    try:
        return (path.parent / _UPLOADED).read_text(encoding="utf-8") == path.name
    except OSError:
        return False


def _note_uploaded(path: Path) -> None:
    """Records which checkpoint was uploaded last, for other ranks on this machine."""
    note = path.parent / f"{_UPLOADED}.new"
    try:
        note.write_text(path.name, encoding="utf-8")
        note.replace(path.parent / _UPLOADED)
    except OSError as error:
        _log.warning("could not inform the ranks that wait for the upload of %s: %s", path, error)


class Uploads:
    """The uploads of one process to one URL."""

    def __init__(
        self,
        url: str,
        directory: Path,
        *,
        metrics: WorkerMetrics,
        patience: timedelta,
        report: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """`directory`: directory of this run's checkpoints. `patience`: how long each call to the
        object store is retried. `report`: receives the size of the backlog in bytes whenever it has
        changed."""
        self.url, self.directory = url, directory
        self._metrics = metrics
        self._patience = patience
        self._report = report
        self._condition = threading.Condition()
        self._saves = 0
        """Number of calls to `changed`."""
        self._wanted = False
        """True if the directory may contain something to upload."""
        self._keep = 1
        self._fence: Callable[[], None] = lambda: None
        self._sent: dict[str, str] = {}
        """Digest of each checkpoint that needs no upload, by name."""
        self._failure: ShoalError | None = None
        """Error of the last attempt; None after a success."""
        self._raised = False
        """True if `check` has raised the failure."""
        # Begun here, because `changed` is called on a thread of lower priority, which the new
        # thread and those of the storage's client would inherit.
        threading.Thread(target=self._run, name=f"uploading to {url}", daemon=True).start()

    def changed(self, *, keep: int, fence: Callable[[], None]) -> None:
        """Starts uploading new checkpoints in the directory; returns immediately. `keep`, `fence`:
        as in `RemoteCheckpoints.upload`."""
        with self._condition:
            self._wanted, self._keep, self._fence = True, keep, fence
            self._saves += 1
            self._condition.notify_all()
        self._show()

    def changed_again(self) -> None:
        """Starts uploading what has changed in the directory since `changed` was last called. Does
        nothing before the first save."""
        if self._saves:
            self.changed(keep=self._keep, fence=self._fence)

    def check(self) -> None:
        """Raises the error of an upload if a retry would fail too (wrong credentials, or a missing
        bucket). Each error is raised once. After other errors, which are only logged, the upload is
        retried with the next save."""
        with self._condition:
            failure = self._failure
            if self._raised or not isinstance(failure, ConfigurationError | PermissionDeniedError):
                return
            self._raised = True
        raise failure

    def wait(self, timeout: timedelta) -> None:
        """Waits until everything is uploaded, and logs the backlog every ten seconds.

        Raises:
            UnavailableError (CHECKPOINT_NOT_UPLOADED): an upload has failed. The checkpoint remains
                in the local directory.
            DeadlineError (CHECKPOINT_SLOW): the uploads take longer than `timeout`.
        """
        give_up_at, lines = time.monotonic() + timeout.total_seconds(), WaitingLines()
        while True:
            with self._condition:
                if not self._wanted:
                    failure = self._failure
                    break
            if time.monotonic() > give_up_at:
                raise DeadlineError(
                    f"uploading to {self.url} did not finish within {timeout.total_seconds():g} s: "
                    f"{self.backlog()} are left in {self.directory}",
                    reason="CHECKPOINT_SLOW",
                )
            lines.say(f"the upload to {self.url}", lambda: f"{self.backlog()} are left")
            run_aside(self._look, "for an upload")
        if failure is not None:
            raise UnavailableError(
                f"checkpoints could not be uploaded: {failure}; {self.backlog()} remain in "
                f"{self.directory}",
                reason="CHECKPOINT_NOT_UPLOADED",
            ) from failure

    def backlog(self) -> Backlog:
        """Returns the number and the size of the checkpoints that are not uploaded yet."""
        left = self._left()
        sizes = 0
        for path in left:
            with contextlib.suppress(OSError):
                sizes += sum(file.stat().st_size for file in path.iterdir())
        return Backlog(len(left), sizes)

    def _look(self) -> None:
        with self._condition:
            if self._wanted:
                self._condition.wait(_LOOK.total_seconds())

    def _left(self) -> list[Path]:
        """Returns the checkpoints that are not uploaded yet, oldest first."""
        with self._condition:
            sent = dict(self._sent)
        return [
            path for path in complete_in(self.directory) if sent.get(path.name) != digest_of(path)
        ]

    def _show(self) -> None:
        backlog = self.backlog()
        self._metrics.upload_backlog(backlog.checkpoints, backlog.nbytes)
        self._report(backlog.nbytes)

    def _run(self) -> None:
        remote = RemoteCheckpoints(ObjectFolder(self.url, self._patience))
        while True:
            with self._condition:
                while not self._wanted:
                    self._condition.wait()
                saves, keep, fence = self._saves, self._keep, self._fence
            left = self._left()
            failure = self._try(remote, left[0], keep, fence) if left else None
            with self._condition:
                if left:
                    self._failure, self._raised = failure, False
                if failure is not None or not left:
                    self._wanted = self._saves != saves  # a failure waits for the next save
                self._condition.notify_all()
            self._show()

    def _try(
        self, remote: RemoteCheckpoints, path: Path, keep: int, fence: Callable[[], None]
    ) -> ShoalError | None:
        """Uploads one checkpoint and counts the outcome. Returns the error if the upload failed."""
        started, outcome, digest = time.monotonic(), "failed", digest_of(path)
        failure: ShoalError | None = None
        links: Path | None = None
        try:
            links = make_temporary(self.directory, f"upload-{path.name}")
            held = links / path.name
            held.mkdir()
            for file in path.iterdir():
                link(file, held / file.name)
            digest = digest_of(held)
            remote.upload(held, fence=fence, keep=keep, progress=self._metrics.uploaded_bytes.inc)
            outcome = "written"
        except (StaleGenerationError, CorruptDataError) as error:
            outcome = "given_up"  # retries would fail as well, and delay the other uploads
            _log.warning("%s was not uploaded to %s: %s", path.name, self.url, error)
        except FileNotFoundError:  # a later save has removed it
            outcome = "given_up"
        except ShoalError as error:
            failure = error
        except Exception as error:  # of any kind, because it must not end the thread
            failure = UnavailableError(
                f"{type(error).__name__}: {error}", reason="CHECKPOINT_NOT_UPLOADED"
            )
        finally:
            if links is not None:
                remove(links)
        if failure is not None:
            _log.warning(
                "%s was not uploaded to %s, and remains in %s: %s",
                path.name,
                self.url,
                self.directory,
                failure,
            )
        if outcome != "failed":
            with self._condition:
                self._sent[path.name] = digest
        if outcome == "written":
            _note_uploaded(path)
        self._metrics.upload_ended(outcome, seconds=time.monotonic() - started)
        return failure
