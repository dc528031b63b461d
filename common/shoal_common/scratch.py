"""Temporary directories that go with their owner, also with one that was killed.

Each has a keeper: a process of its own that waits for the owner's end, and removes what is left
then. It is started before the directory is made, in a session of its own, so that no signal to the
owner's group or terminal reaches it. An owner that closes in good order removes the directory
itself, and ends the keeper.

Where the keeper was killed as well (a machine that loses its power, a container that ends), whoever
makes the next directory removes what dead owners left. An owner holds a lock on its directory, and
on a file in it, for as long as it lives; the kernel lets go of them however it ends. The file gets
its name when it is locked already, so one that can be locked is a dead owner's; and a directory
without one that can be locked after a minute is one, too (in a living owner's the file may be gone:
systems remove old files from /tmp). Nothing is ever removed but directories of this user: shoal-*
with such a file in them, and shoal-scratch-* without one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Final

from shoal_common.errors import ConfigurationError

_PREFIX: Final = "shoal-"
_OWN_PREFIX: Final = "shoal-scratch-"
_LOCK: Final = ".shoal-owner"
_UNLOCKED_S: Final = 60.0
"""A directory of a living owner has its lock long before it is as old as this."""

# Its standard input ends with the owner, and with all that the owner forked: they hold the other
# end as well. What the owner started, such as a Redis server that the kernel is ending, may write
# for a moment longer: so it looks again until nothing comes back.
_KEEPER: Final = """
import os, sys
os.chdir("/")
while os.read(0, 1):
    pass
import shutil, time
give_up_at = time.monotonic() + 60
quiet = 0
while quiet < 5 and time.monotonic() < give_up_at:
    quiet = 0 if os.path.lexists(sys.argv[1]) else quiet + 1
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    time.sleep(0.05)
"""


def temporary_directory() -> Path:
    """Returns the system's temporary directory. Raises ConfigurationError: this user can write to
    none."""
    try:
        return Path(tempfile.gettempdir()).absolute()
    except OSError as error:
        raise ConfigurationError(
            f"{error.strerror}: set TMPDIR to a directory that you can write to"
        ) from error


class ScratchDirectory:
    """One directory below the system's temporary one, until `close`."""

    def __init__(self, purpose: str) -> None:
        """Makes it; `purpose` is part of its name. Raises ConfigurationError: there is no room for
        it, or no directory to write to."""
        temporary = temporary_directory()
        self.path = temporary / f"{_OWN_PREFIX}{purpose}-{secrets.token_hex(8)}"
        try:
            self._make()
        except OSError as error:
            raise ConfigurationError(
                f"{temporary} holds no files of this process: {error}; free some space there, or "
                "set TMPDIR to another directory"
            ) from error

    def _make(self) -> None:
        remove_orphans()
        with contextlib.ExitStack() as undo:
            keeper = _Keeper(self.path)
            undo.callback(keeper.close)  # where the name is taken, it must not remove what has it
            self.path.mkdir(mode=0o700)
            undo.callback(shutil.rmtree, self.path, ignore_errors=True)
            locks = _lock(self.path)
            undo.pop_all()
        self._finalizer = weakref.finalize(self, _remove, self.path, locks, keeper, os.getpid())

    def close(self) -> None:
        """Removes it with all that it holds. Idempotent; happens by itself when nobody has this
        object any more, and at exit."""
        self._finalizer()


class _Keeper:
    """The process that removes `path` when its owner, which makes this object, has ended without
    `close`."""

    def __init__(self, path: Path) -> None:
        """Starts it. Raises OSError."""
        # Nothing is ever written to it: it ends with this process.
        self._process = subprocess.Popen(
            [sys.executable or "python3", "-I", "-S", "-c", _KEEPER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """Ends it: there is nothing to remove any more."""
        self._process.kill()
        self._process.wait()
        self._close_pipe()

    def leave(self) -> None:
        """Lets go of it in a forked child, whose own it is not."""
        self._process.returncode = 0  # else it would be warned of
        self._close_pipe()

    def _close_pipe(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()


def remove_orphans() -> None:
    """Removes this user's scratch directories whose owners are dead."""
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
    for path in found:
        with contextlib.suppress(OSError):  # gone meanwhile, without a lock, or its owner lives
            status = os.lstat(path)
            if status.st_uid == os.geteuid():
                _remove_if_orphaned(Path(path))


def _lock(path: Path) -> tuple[int, int]:
    """Takes the locks of an owner, of the directory and of the file in it. Returns their
    descriptors."""
    with contextlib.ExitStack() as undo:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        undo.callback(os.close, directory)
        # whoever looks for orphans leaves one alone that is as new as this
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock, unnamed = tempfile.mkstemp(dir=path)
        undo.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(unnamed).rename(path / _LOCK)
        undo.pop_all()
    return directory, lock


def _remove(path: Path, locks: tuple[int, int], keeper: _Keeper, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
        keeper.close()
    else:  # a forked child, which inherits this call and the lock
        keeper.leave()
    for lock in locks:
        os.close(lock)


def _remove_if_orphaned(path: Path) -> None:
    # A link in the place of the directory is not followed: only root and this user could have put
    # one there, and neither would mean this.
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        except FileNotFoundError:
            if (
                path.name.startswith(_OWN_PREFIX)
                and time.time() - os.fstat(directory).st_mtime > _UNLOCKED_S
            ):
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
    finally:
        os.close(directory)
