"""Lets one process of a machine do some work before the machine's other processes, such as
downloading a data set or filling a cache.

A kernel file lock selects the first process, without messages between ranks. The kernel releases
the lock as soon as its holder exits for any reason. No rank waits in a collective, where a long
wait would look like a hung process. Each block of a script has its own lock file, and uses a new
one each time the script reaches the block.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Final

from shoal_common.errors import ConfigurationError, DeadlineError

_DONE: Final = b"done"
_LOOK_S: Final = 0.05


class _Passed(threading.local):
    """Counts how many times a rank has reached each position in its script. Thread-local, because
    ranks may be threads."""

    def __init__(self) -> None:
        self.times: Counter[str] = Counter()
        """Number of times that this rank has reached each position in its script."""


_passed: Final = _Passed()


def next_block(called: FrameType | None) -> str:
    """Returns a name for the block that the script is about to enter. The name is the same in all
    processes that run the script. `called`: frame of the function that the script called."""
    place = (
        ""
        if called is None or called.f_back is None
        else f"{called.f_back.f_code.co_filename}:{called.f_back.f_lineno}"
    )
    _passed.times[place] += 1
    return f"{place} {_passed.times[place]}"


@contextlib.contextmanager
def main_first(scope: str, *, timeout: timedelta, once: bool = False) -> Iterator[bool]:
    """Runs the block first in one process of this machine and user. The first process that arrives
    for a `scope` runs the block alone, and the context manager yields True. The others run it
    afterwards, concurrently, and receive False. If the first process fails, another becomes the
    first.

    Args:
        once: True if no process becomes the first again once one has completed the block. By
            default, a process that arrives after all others have left becomes the first again.

    Raises:
        DeadlineError: the first process took longer than `timeout`.
        ConfigurationError: the directory of the locks belongs to a different user.
    """
    descriptor = os.open(_lock_file(scope), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _held.add(descriptor)
    try:
        is_first = _wait_for_turn(descriptor, timeout, once=once)
        if is_first:
            os.ftruncate(descriptor, 0)
        yield is_first  # alone, or together with other holders of the shared lock
        if is_first:
            os.pwrite(descriptor, _DONE, 0)
    finally:
        _held.discard(descriptor)
        # closing the file is not enough, because a child process forked in the block holds the lock
        # too
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


_held: Final[set[int]] = set()
"""File descriptors of the locks held by any thread."""


def _let_go_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def _wait_for_turn(descriptor: int, timeout: timedelta, *, once: bool) -> bool:
    """Waits for the lock. Returns True if this process is the first and holds the lock exclusively;
    False if the first process has finished and this process shares the lock."""
    deadline = time.monotonic() + timeout.total_seconds()
    waited = once
    while True:
        if _taken(descriptor, fcntl.LOCK_EX):
            if not waited or not _is_done(descriptor):
                return True
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        if waited and _taken(descriptor, fcntl.LOCK_SH):
            if _is_done(descriptor):
                return False
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        waited = True
        if time.monotonic() > deadline:
            raise DeadlineError(
                "main_first: the first process of this machine has not finished the block within "
                f"{timeout}; raise main_first(timeout=), or check what that process is doing"
            )
        time.sleep(_LOOK_S)


def _taken(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_done(descriptor: int) -> bool:
    return os.pread(descriptor, len(_DONE), 0) == _DONE


def _lock_file(scope: str) -> Path:
    directory = Path(tempfile.gettempdir()) / f"shoal-first-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise ConfigurationError(
            f"main_first: {directory} belongs to another user; set TMPDIR to a directory of your "
            "own"
        )
    return directory / f"{hashlib.sha256(scope.encode()).hexdigest()[:16]}.lock"
