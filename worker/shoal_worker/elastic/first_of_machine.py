"""What one process of a machine does first, and the others after it: to download a data set, or to
fill a cache.

A lock of the kernel's on a file decides, and no message between ranks: it is free as soon as its
holder ends, however that ends, and nobody waits for it in a collective, where a long wait would
look like a process that hangs. Each block of a script has a file of its own, and another one each
time it is come to.
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
    """A rank may be a thread."""

    def __init__(self) -> None:
        self.times: Counter[str] = Counter()
        """Place in a script -> how often this rank has come there."""


_passed: Final = _Passed()


def next_block(called: FrameType | None) -> str:
    """A name for the block that the caller of `called`'s function is about to enter, the same in
    all processes that run the script."""
    place = (
        ""
        if called is None or called.f_back is None
        else f"{called.f_back.f_code.co_filename}:{called.f_back.f_lineno}"
    )
    _passed.times[place] += 1
    return f"{place} {_passed.times[place]}"


@contextlib.contextmanager
def main_first(scope: str, *, timeout: timedelta, once: bool = False) -> Iterator[bool]:
    """The first process of this machine and this user to come here, for one `scope`, runs what is
    within alone, and is given True. The others run it after that, together, and are given False; if
    the first one did not come to its end, one of them is first.

    Args:
        once: one that comes when all others have left is not first again, if one has come to its
            end before.

    Raises:
        DeadlineError: the first one took longer than `timeout`.
        ConfigurationError: there is no place for a lock that others could not take away.
    """
    descriptor = os.open(_lock_file(scope), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _held.add(descriptor)
    try:
        is_first = _wait_for_turn(descriptor, timeout, once=once)
        if is_first:
            os.ftruncate(descriptor, 0)
        yield is_first  # alone; or beside others: then the lock is shared
        if is_first:
            os.pwrite(descriptor, _DONE, 0)
    finally:
        _held.discard(descriptor)
        # closing is not enough: a child that was forked within has the lock too
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


_held: Final[set[int]] = set()
"""Descriptors of locks, of any thread."""


def _let_go_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def _wait_for_turn(descriptor: int, timeout: timedelta, *, once: bool) -> bool:
    """True: this process is the first one, and holds the lock alone. False: the first one is done,
    and it is shared."""
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
                "main_first: the process of this machine that came first has not finished what is "
                f"within after {timeout}; give main_first(timeout=) more, or see what it does"
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
            f"main_first: {directory} is another user's; set TMPDIR to a directory of your own"
        )
    return directory / f"{hashlib.sha256(scope.encode()).hexdigest()[:16]}.lock"
