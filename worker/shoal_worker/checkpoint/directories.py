"""Directories that appear and disappear whole, also when the process is killed or the machine loses power in between.

A directory under way has a name `.<name>.<host>.<pid>.<random>.tmp`. A dead process may leave one; the next writer on that host removes it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import shutil
import socket
import uuid
from pathlib import Path

_log = logging.getLogger(__name__)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_TEMPORARY = re.compile(r"\..+\.(?P<host>[^.]*)\.(?P<pid>[0-9]+)\.[0-9a-f]{32}\.tmp")


def make_temporary(parent: Path, name: str) -> Path:
    """Makes an empty directory that will be, or was, `parent/name`. Raises OSError."""
    path = _temporary_path(parent, name)
    path.mkdir()
    return path


def publish(temporary: Path, target: Path) -> None:
    """Renames `temporary` to `target`, in place of what is there, and waits until that is on the disk. Raises OSError."""
    if target.exists():
        _exchange(temporary, target)
    else:
        temporary.rename(target)
    sync_directory(target.parent)


def remove(path: Path) -> None:
    """Removes a directory so that it is never seen in part; logs what it cannot remove. Nothing happens if it is not there."""
    doomed = path
    if not _TEMPORARY.fullmatch(path.name):
        doomed = _temporary_path(path.parent, path.name)
        try:
            path.rename(doomed)
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("%s could not be removed: %s", path, error)
            return
    _remove_tree(doomed)


def remove_leftovers(parent: Path) -> None:
    """Removes what processes of this host that are no more have left under way."""
    for path in parent.iterdir():
        found = _TEMPORARY.fullmatch(path.name)
        if found is not None and found["host"] == _host() and not _alive(int(found["pid"])):
            _remove_tree(path)


def sync_file(path: Path) -> None:
    """Waits until the file's content is on the disk."""
    _sync(path, os.O_RDONLY)


def sync_directory(path: Path) -> None:
    """Waits until the directory's entries are on the disk, where the file system knows how to."""
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
    """Swaps the two at once, where the file system can; else there is a moment in which `target` is not there."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE) == 0:
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
