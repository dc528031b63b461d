"""`checkpoint.json`: describes a checkpoint, and marks it as complete.

The file is written last, contains a digest of itself, and records the size and digest of every
other file. The meaning of its fields depends on the layout: "whole" (`files.py`) or "sharded"
(`shards.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import safetensors
import torch
import xxhash
from safetensors import SafetensorError
from shoal_common.errors import CorruptDataError, UnavailableError

from shoal_worker.checkpoint.tensor_writer import write_tensor_file
from shoal_worker.state.serial import stored

# ---------------------------------------------------------------------------------- one tensor file
#
# One safetensors file of a checkpoint. Its size and digest are recorded when it is written, and
# must match when it is read.

SUFFIX: Final = ".safetensors"
_READ_BLOCK = 8 << 20


def write_tensors(
    file: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> dict[str, Any]:
    """Writes contiguous CPU tensors to `file` and waits until they are on the disk. Returns the
    file's entry for the manifest: {"bytes", "xxh3_64"}.

    Raises:
        OSError: the disk is full or failing.
    """
    plain = {name: stored(tensor) for name, tensor in tensors.items()}
    return write_tensor_file(file, plain, metadata)


def describe_file(file: Path) -> dict[str, Any]:
    """Waits until a file is on the disk and returns its entry for the manifest: {"bytes",
    "xxh3_64"}. Raises OSError."""
    sync_file(file)
    return {"bytes": file.stat().st_size, "xxh3_64": _file_digest(file)}


def verify_file(path: Path, name: str, about: Mapping[str, Any]) -> Path:
    """Returns the path `path/name.safetensors` if the file's size and digest match `about`, the
    result of `describe_file`.

    Raises:
        CorruptDataError: the file does not match or cannot be read.
    """
    file = file_of(path, name, about)
    try:
        if _file_digest(file) != about["xxh3_64"]:
            raise damaged(path, f"{file.name} does not match its digest")
    except OSError as error:
        raise damaged(path, f"{file.name} cannot be read: {error}") from error
    return file


def file_of(path: Path, name: str, about: Mapping[str, Any]) -> Path:
    """Returns the path `path/name.safetensors` if the file's size matches `about`, the result of
    `write_tensors`.

    Raises:
        CorruptDataError: the file does not match or does not exist.
    """
    if "/" in name:
        raise damaged(path, f"it refers to {name!r}, a file outside the checkpoint")
    file = path / f"{name}{SUFFIX}"
    try:
        size = file.stat().st_size
    except OSError as error:
        raise damaged(path, f"{file.name} cannot be read: {error}") from error
    if size != about["bytes"]:
        raise damaged(path, f"{file.name} has {size} bytes, but {about['bytes']} were written")
    return file


@contextlib.contextmanager
def opened(path: Path, name: str, about: Mapping[str, Any]) -> Iterator[Any]:
    """Opens `path/name.safetensors` with the library's `safe_open` and yields the result. The
    library maps the file into memory, so the tensors are invalid once the context has ended.
    `about`: the result of `write_tensors`.

    Raises:
        CorruptDataError: the file does not match `about` or cannot be read.
    """
    file = verify_file(path, name, about)
    try:
        with safetensors.safe_open(file, framework="pt") as found:
            yield found
    except (OSError, SafetensorError, ValueError) as error:
        raise damaged(path, f"{file.name} cannot be read: {error}") from error


def read_tensors(path: Path, name: str, about: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors of `path/name.safetensors`, which own their memory. Raises the same
    errors as `opened`."""
    with opened(path, name, about) as file:  # not a Mapping: it has only keys()
        return {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118


@contextlib.contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Converts disk errors within the context to UnavailableError (CHECKPOINT_NOT_WRITTEN)."""
    try:
        yield
    except OSError as error:
        failure = UnavailableError(
            f"checkpoint {target} could not be written: {error}", reason="CHECKPOINT_NOT_WRITTEN"
        )
        failure.failed_at = time.time()  # the failing rank raises it later, at its next save
        raise failure from error


def _file_digest(file: Path) -> str:
    digest = xxhash.xxh3_64()
    with file.open("rb") as opened:
        while block := opened.read(_READ_BLOCK):
            digest.update(block)
    return digest.hexdigest()


_log = logging.getLogger(__name__)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<host>[^.]*)\.(?P<pid>[0-9]+)\.[0-9a-f]{32}\.tmp")


# --------------------------------------------------------------- directories that appear atomically
#
# Directories that appear and disappear atomically, even if the process is killed or the machine
# loses power in between. An unfinished directory has a name `.<name>.<host>.<pid>.<random>.tmp`. If
# a process dies, it may leave one behind; the next writer on that host removes it.


def make_temporary(parent: Path, name: str) -> Path:
    """Creates an empty temporary directory in `parent`, in which `parent/name` is written or
    removed. Raises OSError."""
    path = _temporary_path(parent, name)
    path.mkdir()
    return path


def publish(temporary: Path, target: Path) -> None:
    """Renames `temporary` to `target`, and waits until the change is on the disk. If `target`
    exists, the two swap names. Raises OSError."""
    if target.exists():
        _exchange(temporary, target)
    else:
        temporary.rename(target)
    sync_directory(target.parent)


def remove(path: Path) -> None:
    """Removes a directory atomically: no process sees it incomplete. Logs files that cannot be
    removed. Does nothing if the directory does not exist.

    The directory is renamed first, so that a process that is still writing to the old name fails
    immediately and cannot add files during the removal.
    """
    under_way = _TEMPORARY.fullmatch(path.name)
    doomed = _temporary_path(path.parent, under_way["name"] if under_way else path.name)
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("%s could not be removed: %s", path, error)
        return
    _remove_tree(doomed)


def remove_leftovers(parent: Path) -> None:
    """Removes unfinished directories that dead processes of this host left behind."""
    for path in parent.iterdir():
        found = _TEMPORARY.fullmatch(path.name)
        if found is not None and found["host"] == _host() and not _alive(int(found["pid"])):
            _remove_tree(path)


def sync_file(path: Path) -> None:
    """Waits until the file's content is on the disk."""
    _sync(path, os.O_RDONLY)


def sync_directory(path: Path) -> None:
    """Waits until the directory's entries are on the disk, if the file system supports that."""
    try:
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(temporary: Path, target: Path) -> None:
    """Swaps the two directories atomically if the file system supports that; otherwise `target` is
    briefly absent."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.renameat2(
            _AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE
        )
        == 0
    ):
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise OSError(code, os.strerror(code), str(temporary))
    old = _temporary_path(target.parent, target.name)
    target.rename(old)
    temporary.rename(target)
    remove(old)


def _temporary_path(parent: Path, name: str) -> Path:
    return parent / f".{name}.{_host()}.{os.getpid()}.{uuid.uuid4().hex}.tmp"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove_tree(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("%s could not be removed: %s", path, error)


NAME: Final = "checkpoint.json"
_FORMAT = "shoal-checkpoint"
_VERSION = 1
_VERSION_WITH_FROZEN = 2
"""Version of checkpoints that store frozen parameters separately. Earlier releases cannot read
them."""
WHOLE: Final = "whole"
SHARDED: Final = "sharded"
_LAYOUTS = (WHOLE, SHARDED)
_ENVELOPE = frozenset({"format", "version", "xxh3_64"})


# ------------------------------------------------------------------------------------- the manifest


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Description of a checkpoint."""

    step: int
    """Number of optimizer steps that the run had committed; part of the directory's name."""
    strategy: str
    world_size: int
    """Number of ranks that saved the checkpoint. Any number of ranks can load it."""
    generation: int
    """Generation that saved the checkpoint."""
    run: str = ""
    """Id of the run that saved the checkpoint. A run starts without a checkpoint, and continues
    across membership changes and resumes."""
    metric: float | None = None
    """Quality of the state, used to choose the best checkpoint; None if the script gave no
    metric."""
    mode: str = ""
    """Direction of `metric`: "min" if smaller values are better, "max" if larger values are; empty
    if there is no metric."""
    stopped_early: str = ""
    """Name of the loader whose `epochs()` loop `should_early_stop` ended after this step; empty if
    early stopping ended none."""
    shoal_version: str = field(default_factory=lambda: version("shoal-worker"))
    """Release of Shoal that wrote the checkpoint."""


def write_manifest(directory: Path, info: CheckpointInfo, layout: str, **content: Any) -> None:
    """Writes or replaces the manifest atomically, and waits until it and everything else in the
    directory are on the disk. Raises OSError."""
    content = {"info": asdict(info), "layout": layout, **content}
    version = _VERSION_WITH_FROZEN if "frozen" in content else _VERSION
    document = {"format": _FORMAT, "version": version, "xxh3_64": _digest_of(content), **content}
    manifest = directory / f".{NAME}"
    lines = (f'"{key}":{_compact(value)}' for key, value in document.items())
    manifest.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    sync_file(manifest)
    manifest.replace(directory / NAME)
    sync_directory(directory)


def read_info(path: Path) -> CheckpointInfo:
    """Reads the description of the checkpoint in `path`. Raises the same errors as
    `read_manifest`."""
    return info_in(read_manifest(path), path)


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns the content of an undamaged manifest.

    Raises:
        CorruptDataError: the manifest is damaged (FILE_CORRUPT), was not written by Shoal
            (FILE_FOREIGN), or was written by a newer release (FILE_NEWER).
    """
    try:
        content = (path / NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptDataError(
            f"{path} is not a Shoal checkpoint: it has no {NAME}", reason="FILE_FOREIGN"
        ) from error
    except OSError as error:
        raise damaged(path, f"its {NAME} cannot be read: {error}") from error
    return parse_manifest(content, path)


def parse_manifest(manifest: bytes, path: Path | str) -> dict[str, Any]:
    """Returns the content of an undamaged manifest from its bytes. `path`: path of the checkpoint,
    for errors. Raises the same errors as `read_manifest`."""
    try:
        document = json.loads(manifest)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its {NAME} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise CorruptDataError(
            f"{path} is not a Shoal checkpoint: its {NAME} lacks the format {_FORMAT!r}",
            reason="FILE_FOREIGN",
        )
    if (
        document.get("version") not in (_VERSION, _VERSION_WITH_FROZEN)
        or document.get("layout") not in _LAYOUTS
    ):
        raise CorruptDataError(
            f"checkpoint {path} has format version {document.get('version')!r} and layout "
            f"{document.get('layout')!r}, but this release reads versions up to "
            f"{_VERSION_WITH_FROZEN} and layout "
            f"{' or '.join(map(repr, _LAYOUTS))}; load it with the release that wrote it, "
            f"{_release(document)}",
            reason="FILE_NEWER",
        )
    content = {key: value for key, value in document.items() if key not in _ENVELOPE}
    if document.get("xxh3_64") != _digest_of(content):
        raise damaged(path, f"its {NAME} does not match its digest")
    return content


def info_in(content: Mapping[str, Any], path: Path | str) -> CheckpointInfo:
    """Returns the checkpoint's description from the content of its manifest. Raises
    CorruptDataError."""
    try:
        return CheckpointInfo(**content["info"])
    except (KeyError, TypeError) as error:
        raise damaged(path, f"its {NAME} is incomplete or invalid: {error!r}") from error


def digest_of(path: Path) -> str:
    """Returns a digest that identifies the checkpoint in `path`: the digest of its manifest, which
    contains the digests of all files. Returns an empty string if the manifest cannot be read."""
    try:
        return _file_digest(path / NAME)
    except OSError:
        return ""


def damaged(path: Path | str, what: str) -> CorruptDataError:
    """Returns the error for a checkpoint that has changed since it was written. `what`: how it has
    changed."""
    return CorruptDataError(
        f"checkpoint {path} is damaged: {what}; use an older checkpoint, or a copy of this one",
        reason="FILE_CORRUPT",
    )


def _release(document: Mapping[str, Any]) -> str:
    info = document.get("info")
    return str(info.get("shoal_version", "unknown")) if isinstance(info, dict) else "unknown"


def _digest_of(content: Any) -> str:
    return xxhash.xxh3_64_hexdigest(_compact(content, sort_keys=True).encode())


def _compact(content: Any, *, sort_keys: bool = False) -> str:
    return json.dumps(content, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False)
