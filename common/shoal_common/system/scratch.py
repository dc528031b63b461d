"""Temporary directories that are removed when the process that owns them ends, even if it is
killed.

Each directory has a keeper: a separate process that waits until the owner has ended and then
removes the directory if it still exists. The keeper is started before the directory is created, in
its own session, so that signals to the owner's process group or terminal do not reach it. If the
owner closes the directory, it removes the directory itself and stops the keeper.

If the keeper was killed too (power failure, stopped container), the next process that creates a
directory removes the directories of dead owners. A living owner holds locks on its directory and on
a file in it; the kernel releases the locks no matter how the owner ends. The file gets its name
only after it is locked, so a file that can be locked belongs to a dead owner. The file may also be
missing because the system has removed old files from /tmp. A directory without the file therefore
belongs to a dead owner only if it has not changed for a minute and can itself be locked. Only
directories of this user are removed: those named shoal-* that contain the file, and those named
shoal-scratch-* that do not.
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
"""Age in seconds after which a living owner must have locked its directory. Locking takes far less
time."""

# Its standard input reaches end of file when the owner and all processes that it has forked have
# exited, because they hold the other end of the pipe. A process started by the owner, such as a
# Redis server being killed by the kernel, may write for a moment longer, so it checks again until
# nothing reappears.
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
    """Returns the system's temporary directory. Raises ConfigurationError if this user cannot write
    to any."""
    try:
        return Path(tempfile.gettempdir()).absolute()
    except OSError as error:
        raise ConfigurationError(f"{error.strerror}; set TMPDIR to a writable directory") from error


class ScratchDirectory:
    """A directory in the system's temporary directory, removed by `close`."""

    def __init__(self, purpose: str) -> None:
        """Creates the directory. `purpose`: word in its name. Raises ConfigurationError if there is
        no space or no writable directory."""
        temporary = temporary_directory()
        self.path = temporary / f"{_OWN_PREFIX}{purpose}-{secrets.token_hex(8)}"
        try:
            self._make()
        except OSError as error:
            raise ConfigurationError(
                f"cannot write to {temporary}: {error}; free some space there, or set TMPDIR to "
                "another directory"
            ) from error

    def _make(self) -> None:
        remove_orphans()
        with contextlib.ExitStack() as undo:
            keeper = _Keeper(self.path)
            # if mkdir fails, the helper process must not remove a directory that exists already
            undo.callback(keeper.close)
            self.path.mkdir(mode=0o700)
            undo.callback(shutil.rmtree, self.path, ignore_errors=True)
            locks = _lock(self.path)
            undo.pop_all()
        self._finalizer = weakref.finalize(self, _remove, self.path, locks, keeper, os.getpid())

    def close(self) -> None:
        """Removes the directory with its contents. Idempotent. This also happens when the object is
        garbage-collected, and at exit."""
        self._finalizer()


class _Keeper:
    """Helper process that removes `path` if its parent exits without calling `close`."""

    def __init__(self, path: Path) -> None:
        """Starts the helper process. Raises OSError."""
        # Nothing is ever written to the pipe, which is closed when this process ends.
        self._process = subprocess.Popen(
            [sys.executable or "python3", "-I", "-S", "-c", _KEEPER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """Stops the helper process after the directory has been removed."""
        self._process.kill()
        self._process.wait()
        self._close_pipe()

    def leave(self) -> None:
        """Detaches a forked child from the helper process, which belongs to the parent."""
        self._process.returncode = (
            0  # prevents Popen's warning about a process that is still running
        )
        self._close_pipe()

    def _close_pipe(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()


def remove_orphans() -> None:
    """Removes the scratch directories of this user whose owners are dead."""
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
    for path in found:
        with contextlib.suppress(
            OSError
        ):  # the directory has been removed or has no lock, or its owner is alive
            status = os.lstat(path)
            if status.st_uid == os.geteuid():
                _remove_if_orphaned(Path(path))


def _lock(path: Path) -> tuple[int, int]:
    """Locks a scratch directory and a file in it on behalf of the owner. Returns the descriptors of
    both."""
    with contextlib.ExitStack() as undo:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        undo.callback(os.close, directory)
        # the search for orphans skips new directories such as this one
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
    # A link in place of the directory is not followed: only root and this user could have put one
    # there, and neither would intend this.
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
