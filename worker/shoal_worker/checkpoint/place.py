"""Location of a script's checkpoints: a directory, or an object store with a local staging
directory.

A checkpoint for `s3://bucket/run` is first written to `<staging>/<digest of the URL>/run-<id>/`,
and downloaded to that directory before it is read. The object store determines which checkpoints
exist: `resume` never reads a local checkpoint that the object store does not have.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import xxhash
from shoal_common.errors import ConfigurationError

from shoal_worker.checkpoint.files import STEP, complete_in, latest
from shoal_worker.checkpoint.manifest import NAME, disk_errors, remove
from shoal_worker.checkpoint.remote import RemoteCheckpoints, folder_of
from shoal_worker.object_storage import PATIENCE, ObjectFolder, is_url, local_path
from shoal_worker.settings import WorkerSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The directory or URL that a script has named for its checkpoints."""

    named: str
    """Path or URL, as the script passed it."""
    directory: Path
    """The directory; for a URL, the staging directory of all runs."""
    url: str | None = None
    patience: timedelta = PATIENCE
    """Maximum time to retry each call to the object store."""

    @classmethod
    def of(cls, named: str | Path, settings: WorkerSettings) -> Place:
        """Returns the place that a script named, without creating it.

        Raises:
            ConfigurationError: the URL is invalid, or the package that it requires is missing.
        """
        if not is_url(named):
            # absolute: the script may change its directory while the writer works
            return cls(named=str(named), directory=local_path(named).absolute())
        url = str(named).rstrip("/")
        ObjectFolder.check(url)
        return cls(
            named=url,
            directory=settings.staging / xxhash.xxh3_64_hexdigest(url.encode()),
            url=url,
            patience=settings.upload_timeout,
        )

    def local(self, run: str) -> Path:
        """Returns the directory for the checkpoints of a run."""
        return self.directory if self.url is None else self.directory / folder_of(run)

    def text(self, name: str) -> str:
        """Returns the path or URL of the checkpoint `name`, for messages."""
        return f"{self.named}/{name}" if self.url is not None else str(Path(self.named) / name)

    def remote(self) -> RemoteCheckpoints:
        """Returns the checkpoints in the object store. Only for a place with a URL."""
        assert self.url is not None, self.named
        return RemoteCheckpoints(ObjectFolder.at(self.url, self.patience))

    def check(self, step: int, run: str) -> None:
        """Raises ConfigurationError if the object store contains a checkpoint of a different run
        whose step is later than `step`. Also raises the errors of `ObjectFolder`. Does nothing if
        this place is a directory."""
        if self.url is not None:
            self.remote().check_place(step, run)

    def readable(self, run: str | None = None) -> Path:
        """Returns a directory whose newest checkpoint is the newest one in this place. If this
        place has a URL, downloads that checkpoint first. `run`: considers only checkpoints of this
        run; None: of any run.

        Raises:
            ConfigurationError: the URL names a single checkpoint.
            Exception: as in `RemoteCheckpoints.fetch`.
        """
        if self.url is None:
            return self.directory
        remote = self.remote()
        name = remote.newest(run)
        own = None if run is None else latest(self.local(run), run=run)
        if own is not None and (name is None or _step(own.name) > _step(name)):
            return own.parent  # this run has saved it, and has not uploaded it yet
        if name is None and remote.folder.read(NAME) is not None:
            raise ConfigurationError(
                f"resume({self.named!r}): expected the URL passed to save_checkpoint, whose newest "
                "checkpoint is loaded; found a single checkpoint"
            )
        if name is None:
            return self.directory / "nothing"
        path = remote.fetch(name, self.directory)
        _set_aside_after(path)
        return path.parent


def check_same_place(what: str, kind: str, named: Sequence[str]) -> None:
    """Raises ConfigurationError if the ranks have named different places in a call. A relative path
    may be a different place on each machine.

    Args:
        what: name of the call.
        kind: "directory" or "path".
        named: the place that each rank has named, in rank order.
    """
    other = next((rank for rank, each in enumerate(named) if each != named[0]), None)
    if other is not None:
        raise ConfigurationError(
            f"{what}: rank 0 passed the {kind} {named[0]!r}, but rank {other} passed "
            f"{named[other]!r}; pass the same {kind} on every rank, for example one sent by "
            "shoal.broadcast, not one that depends on the rank or on random numbers"
        )


@contextmanager
def downloaded(
    named: str | Path, settings: WorkerSettings, *, best: bool = False
) -> Iterator[Path]:
    """Yields a local path that can be read within the context. For a local path, yields the path
    itself. For a URL, downloads one checkpoint to a temporary directory: the one that the URL names
    or, if it names a folder of checkpoints, the newest one in it (with `best`, the best one).

    Raises:
        ConfigurationError: there is no such checkpoint.
        Exception: as in `RemoteCheckpoints.fetch`.
    """
    if not is_url(named):
        yield local_path(named)
        return
    url = str(named).rstrip("/")
    parent, _, last = url.rpartition("/")
    patience = settings.upload_timeout
    is_one = STEP.fullmatch(last) is not None and (
        ObjectFolder.at(url, patience).read(NAME) is not None
    )
    remote = RemoteCheckpoints(ObjectFolder.at(parent if is_one else url, patience))
    if is_one and best:
        raise ConfigurationError(
            f"best=True: {url} is a single checkpoint; expected the URL passed to save_checkpoint"
        )
    name = last if is_one else remote.best() if best else remote.newest()
    if name is None:
        raise ConfigurationError(
            f"best=True: no checkpoint of the newest run in {url} was saved with "
            "save_checkpoint(..., best=...)"
            if best and remote.newest() is not None
            else f"there is no checkpoint in {url}; expected a URL passed to save_checkpoint, or a "
            "step-<n> in it"
        )
    settings.staging.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="load-", dir=settings.staging) as into:
        yield remote.fetch(name, Path(into))


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))


def _set_aside_after(path: Path) -> None:
    """Renames local checkpoints that are newer than `path`, the newest checkpoint in the object
    store. Because the object store does not have them, they must be neither read nor uploaded."""
    for other in complete_in(path.parent):
        if _step(other.name) > _step(path.name):
            aside = other.with_name(f"not-uploaded-{other.name}")
            remove(aside)
            with disk_errors(aside):
                other.rename(aside)
            _log.warning(
                "%s was never uploaded, or was removed from the object store; it is kept as %s",
                other,
                aside,
            )
