"""Checkpoints in an object store: one folder per checkpoint, complete once it has a manifest.

    s3://bucket/run/
      newest.json               name of the checkpoint uploaded last
      step-1200/
        model.safetensors, ...  as in a directory (`files.py`)
        uploading.json          present while a process uploads: its run
        checkpoint.json         written last, removed first

Nothing is renamed, because an object store cannot rename objects. A process that dies during an
upload leaves a folder without a manifest, which is not a checkpoint. The next upload of the same
run removes such folders. Reading an object always returns its current content, but a listing may be
out of date. Therefore, `newest.json` names a checkpoint that the listing may lack, and a listed
folder is ignored unless its manifest can be read. `uploads.py` and `saving.py` decide which rank
uploads, and when.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from shoal_common.errors import ConfigurationError, CorruptDataError, ShoalError, UnavailableError
from shoal_common.failpoints import failpoint

from shoal_worker.checkpoint import manifest
from shoal_worker.checkpoint.files import STEP, best_of, superseded
from shoal_worker.checkpoint.frozen import KEY
from shoal_worker.checkpoint.manifest import (
    NAME,
    SUFFIX,
    CheckpointInfo,
    damaged,
    disk_errors,
    info_in,
    make_temporary,
    parse_manifest,
    publish,
    remove,
    remove_leftovers,
    sync_directory,
    sync_file,
)
from shoal_worker.checkpoint.rows import SavedRows
from shoal_worker.object_storage import ObjectFolder

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _NoValue:
    """Type of the marker that ends an iteration."""


_NO_VALUE: Final = _NoValue()
_UPLOADING: Final = "uploading.json"
_NEWEST: Final = "newest.json"
_FILES_AT_ONCE: Final = 3
"""Number of files transferred at the same time. Together with the sizes of their parts, this limits
the memory for a transfer to 100 MB, and as much again for the clients' copies."""


class RemoteCheckpoints:
    """The checkpoints under one URL. May be used by only one thread at a time. Every method raises
    the errors of `ObjectFolder`."""

    def __init__(self, folder: ObjectFolder) -> None:
        self.folder = folder
        self._infos: dict[str, CheckpointInfo] = {}
        """Descriptions of checkpoints that this process has uploaded."""
        self._frozen: tuple[str, Any] = ("", None)
        """Name of the checkpoint uploaded last, and its manifest's entry for frozen parameters."""

    @property
    def url(self) -> str:
        """URL of the folder of all checkpoints."""
        return self.folder.url

    def newest(self, run: str | None = None) -> str | None:
        """Returns the name of the complete checkpoint with the highest step; None if there is none.
        `run`: considers only checkpoints of this run; None: of any run."""
        return next(
            (
                name
                for name, info in self._described()
                if run is None or info is None or info.run in (run, "")
            ),
            None,
        )

    def best(self) -> str | None:
        """Returns the name of the newest run's checkpoint with the best metric; None if no
        checkpoint has a metric."""
        found = list(self._described())
        if not found:
            return None
        run = found[0][1].run if found[0][1] is not None else ""
        return best_of([(name, info) for name, info in found if info is None or info.run == run])

    def check_place(self, step: int, run: str) -> None:
        """Raises ConfigurationError if there is a checkpoint of a different run whose step is later
        than `step`: that checkpoint would remain the newest."""
        for name, info in self._described():
            if not run or _step_of(name) <= step:
                return
            if info is not None and info.run not in (run, ""):
                raise ConfigurationError(
                    f"{self.url} contains {name} of another run, which would count as newer than "
                    f"step {step} of this run: give each run its own URL, or continue from there: "
                    "call shoal.resume before the loop, or train(resume_from_checkpoint=True) of a "
                    "Trainer"
                )

    def fetch(self, name: str, into: Path) -> Path:
        """Downloads a checkpoint to `into/run/name`, where `run` is the checkpoint's run, unless
        the same checkpoint is already there. Returns that path. The digests are verified when the
        checkpoint is read.

        Raises:
            CorruptDataError: as in `read_manifest`.
            UnavailableError (CHECKPOINT_NOT_WRITTEN): the local disk is full or failing.
        """
        where = f"{self.url}/{name}"
        folder = self.folder.child(name)
        content = folder.read(NAME)
        if content is None:
            raise CorruptDataError(
                f"{where} is not a Shoal checkpoint: it has no {NAME}", reason="FILE_FOREIGN"
            )
        described = parse_manifest(content, where)
        files = _files_in(described, where)
        directory = into / folder_of(info_in(described, where).run)
        target = directory / name
        if _has(target, content, files):
            return target
        with disk_errors(target):
            directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(directory)
            temporary = make_temporary(directory, name)
        try:
            with disk_errors(target):
                _in_parallel(
                    lambda each: _download(folder, each[0], temporary, each[1], where),
                    files.items(),
                )
                (temporary / NAME).write_bytes(content)
                sync_file(temporary / NAME)
                sync_directory(temporary)
                publish(temporary, target)
        finally:
            remove(temporary)
        return target

    def upload(
        self,
        local: Path,
        *,
        fence: Callable[[], None],
        keep: int,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Uploads the complete checkpoint in the directory `local` under the same name, the
        manifest last. Replaces an older checkpoint of the same step. Then removes checkpoints of
        the same run that need not be kept, and incomplete uploads that dead processes of the run
        left behind.

        Args:
            fence: raises if this process may no longer publish.
            keep: >= 1.
            progress: receives the size of each file in bytes once the file is uploaded.

        Raises:
            CorruptDataError, OSError: the local checkpoint is damaged.
        """
        content = (local / NAME).read_bytes()
        described = parse_manifest(content, local)
        info, files = info_in(described, local), _files_in(described, local)
        folder = self.folder.child(local.name)
        present = folder.read(NAME)
        if present != content:
            before = _known_files(present)
            if present is None or before != _entries(described):
                self._remove(local.name)  # an incomplete folder, or a different state
                folder.write(_UPLOADING, json.dumps({"run": info.run}).encode())
                source = self._with_frozen(described)

                def send(each: tuple[str, int]) -> None:
                    name, nbytes = each
                    failpoint("checkpoint.upload_file")
                    if not (source is not None and _copied(source, folder, name, nbytes)):
                        folder.upload(local / name, name)
                    progress(nbytes)

                _in_parallel(send, files.items())
            fence()
            failpoint("checkpoint.upload_manifest")
            folder.write(NAME, content)
            self.folder.write(_NEWEST, json.dumps({"name": local.name}).encode())
            folder.remove([_UPLOADING])
        self._infos[local.name] = info
        self._frozen = local.name, described.get(KEY)
        self._prune(local.name, info.run, keep)

    def _with_frozen(self, described: Mapping[str, Any]) -> ObjectFolder | None:
        """Returns the folder of the last checkpoint if it has the same frozen values, otherwise
        None."""
        name, frozen = self._frozen
        same = frozen is not None and frozen == described.get(KEY)
        return self.folder.child(name) if name and same else None

    def _prune(self, written: str, run: str, keep: int) -> None:
        """Removes checkpoints beyond `keep`. If a removal fails, the upload still succeeds."""
        try:
            own = [
                (name, info)
                for name, info in self._described()
                if info is None or info.run in (run, "")
            ]
            if written not in (name for name, _ in own):
                return  # the listing is out of date and may lack other checkpoints as well
            for name in superseded(own, written, keep):
                self._remove(name)
                self._infos.pop(name, None)
            complete = {name for name, _ in own}
            for name in self._names():
                if name not in complete and self._is_left(name, run):
                    self._remove(name)
        except ShoalError as error:
            _log.warning("older checkpoints in %s could not be removed: %s", self.url, error)

    def _is_left(self, name: str, run: str) -> bool:
        """Returns whether a folder was left by an interrupted upload of this run."""
        folder = self.folder.child(name)
        uploading = folder.read(_UPLOADING)
        if uploading is None or folder.read(NAME) is not None:
            return False
        try:
            return bool(json.loads(uploading)["run"] == run)
        except (ValueError, KeyError, TypeError):
            return False

    def _remove(self, name: str) -> None:
        """Removes a checkpoint. Removes its manifest first, so that the remaining files are not
        mistaken for a checkpoint."""
        folder = self.folder.child(name)
        folder.remove([NAME])
        folder.remove(each for each in folder.names() if each != _UPLOADING)
        folder.remove([_UPLOADING])

    def _names(self) -> list[str]:
        """Returns the names of all folders, complete or not, newest first."""
        found = {name for name in self.folder.names() if STEP.fullmatch(name)}
        with contextlib.suppress(TypeError, ValueError, KeyError):
            newest = str(json.loads(self.folder.read(_NEWEST) or b"{}")["name"])
            if STEP.fullmatch(newest):
                found.add(newest)
        return sorted(found, key=_step_of, reverse=True)

    def _described(self) -> Iterator[tuple[str, CheckpointInfo | None]]:
        """Yields the complete checkpoints, newest first, each with its description, or None if the
        description cannot be read."""
        for name in self._names():
            info = self._infos.get(name)
            if info is not None:
                yield name, info
                continue
            content = self.folder.child(name).read(NAME)
            if content is None:
                continue
            where = f"{self.url}/{name}"
            try:
                yield name, info_in(parse_manifest(content, where), where)
            except CorruptDataError:
                yield name, None


def folder_of(run: str) -> str:
    """Returns the name of a run's directory in the staging directory."""
    return f"run-{re.sub(r'[^A-Za-z0-9_-]', '-', run)}"


def _step_of(name: str) -> int:
    match = STEP.fullmatch(name)
    assert match is not None, name
    return int(match[1])


def _entries(content: Mapping[str, Any]) -> Any:
    """Returns the part of a manifest that describes files."""
    frozen = content.get(KEY, {})
    return content.get("files"), content.get("rows"), frozen.get("files")


def _known_files(present: bytes | None) -> Any:
    if present is None:
        return None
    try:
        return _entries(parse_manifest(present, ""))
    except CorruptDataError:
        return None


def _files_in(content: Mapping[str, Any], path: Path | str) -> dict[str, int]:
    """Returns the sizes of a checkpoint's files, by their names."""
    try:
        frozen = content.get(KEY, {}).get("files", {})
        rows = SavedRows(path=Path(), tables=content.get("rows", {})).files()
        entries = {**content["files"], **frozen, **rows}
        sizes = {f"{name}{SUFFIX}": int(about["bytes"]) for name, about in entries.items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise damaged(path, f"its {manifest.NAME} is incomplete or invalid: {error!r}") from error
    for name in sizes:
        if "/" in name:
            raise damaged(path, f"it refers to {name!r}, a file outside the checkpoint")
    return sizes


def _has(target: Path, content: bytes, files: Mapping[str, int]) -> bool:
    """Returns whether a directory contains the checkpoint with this manifest. `content`: the
    manifest's bytes. `files`: size of each file, by name."""
    try:
        return (target / NAME).read_bytes() == content and all(
            (target / name).stat().st_size == size for name, size in files.items()
        )
    except OSError:
        return False


def _download(folder: ObjectFolder, name: str, temporary: Path, size: int, where: str) -> None:
    try:
        folder.download(name, temporary / name, size)
    except FileNotFoundError as error:
        raise damaged(where, f"{name} does not exist") from error


def _copied(source: ObjectFolder, folder: ObjectFolder, name: str, nbytes: int) -> bool:
    """Copies a file with frozen values from an earlier checkpoint. Returns False if that fails."""
    if not name.startswith("frozen-"):
        return False
    try:
        folder.copy(source, name, nbytes)
    except (FileNotFoundError, UnavailableError):
        return False
    return True


def _in_parallel(work: Callable[[T], None], values: Iterable[T]) -> None:
    """Calls `work` for several values at a time, and raises the first error. After an error, no
    further call begins. Does not use a thread pool, because Python's pools reject work while the
    process exits (`object_storage.ThreadPerCall`)."""
    rest, errors, lock = iter(values), list[BaseException](), threading.Lock()

    def work_on() -> None:
        while not errors:
            with lock:
                value = next(rest, _NO_VALUE)
            if isinstance(value, _NoValue):
                return
            try:
                work(value)
            except BaseException as error:  # raised on the caller's thread
                errors.append(error)

    threads = [
        threading.Thread(target=work_on, name="shoal-storage", daemon=True)
        for _ in range(_FILES_AT_ONCE)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
