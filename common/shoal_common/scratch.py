"""Temporary directories that go with their owner, also with one that was killed: whoever makes the next one removes what dead ones left.

An owner holds a lock on a file in its directory for as long as it lives; the kernel lets go of it however it ends. The file gets its name
when it is locked already, so one that can be locked is a dead owner's. Only directories shoal-* of this user with such a file in them are
ever removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Final

_PREFIX: Final = "shoal-"
_LOCK: Final = ".shoal-owner"


class ScratchDirectory:
    """One directory below the system's temporary one, until `close`."""

    def __init__(self, purpose: str) -> None:
        """Makes it; `purpose` is part of its name. Raises OSError."""
        remove_orphans()
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-"))
        lock, unnamed = tempfile.mkstemp(dir=self.path)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(unnamed).rename(self.path / _LOCK)
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Removes it with all that it holds. Idempotent; happens by itself when nobody has this object any more, and at exit."""
        self._finalizer()


def remove_orphans() -> None:
    """Removes this user's scratch directories whose owners are dead."""
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
    for path in found:
        with contextlib.suppress(OSError):  # gone meanwhile, without a lock, or its owner lives
            status = os.lstat(path)
            if status.st_uid == os.geteuid():
                _remove_if_orphaned(Path(path))


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # not a forked child, which inherits this call and the lock
        shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _remove_if_orphaned(path: Path) -> None:
    # A link in the place of the directory is not followed: only root and this user could have put one there, and neither would mean this.
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
    finally:
        os.close(directory)
