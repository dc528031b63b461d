"""Reads the Python stacks of other processes of the same user, without ptrace.

A process that calls `serve_stacks` opens a file in memory. When a real-time signal arrives,
`faulthandler` writes the stacks of all threads to the file. This handler is C code, so it works
even while a thread holds Python's lock. `read_stacks` opens the file through /proc, sends the
signal, and waits until the handler has returned. Children that the process forks (data workers)
inherit the file and the handler. As with any signal, a system call in progress may return early;
Python retries it (PEP 475). Linux only.

faulthandler writes at most 100 threads, the newest first. If there are more, a second signal makes
it write only the stack of the thread that handles the signal. That is the main thread, which Linux
prefers for a signal to the process (`complete_signal` in kernel/signal.c).
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Final

from shoal_common.errors import DeadlineError, PreconditionError, UnknownResourceError

_SIGNAL: Final = int(signal.SIGRTMAX) - 3
_MAIN_SIGNAL: Final = _SIGNAL - 1
_FILE: Final = "shoal-stacks"
_POLL_S: Final = 0.005
_THREAD: Final = re.compile(r"^(?:(?:Current thread|Thread) 0x|Stack \().*$", re.MULTILINE)
_MORE_THREADS: Final = "\n...\n"
"""End of the list of threads if it is incomplete."""


@cache
def serve_stacks() -> bool:
    """Allows other processes of this user to read this process's stacks from now on. Must be called
    at most once per process.

    Returns False, and changes nothing, if a signal is in use or the system has no files in memory.
    """
    if any(signal.getsignal(each) is not signal.SIG_DFL for each in (_SIGNAL, _MAIN_SIGNAL)):
        return False
    try:
        file = os.memfd_create(_FILE, os.MFD_CLOEXEC)
    except OSError:
        return False
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # a reader may have emptied the file
    faulthandler.register(_SIGNAL, file=file, all_threads=True, chain=False)
    faulthandler.register(_MAIN_SIGNAL, file=file, all_threads=False, chain=False)
    return True


def read_stacks(pid: int, *, timeout: timedelta = timedelta(seconds=5)) -> list[str]:
    """Returns the stacks of a process's threads, in the format of faulthandler: the main thread
    first, each stack with the innermost call first. Returns at most 101 threads.

    Raises:
        UnknownResourceError (PROCESS_UNKNOWN): there is no such process.
        PreconditionError: the process does not serve its stacks, or belongs to another user.
        DeadlineError: the process did not respond within `timeout`, for example because it is
            stopped.
    """
    give_up_at = time.monotonic() + timeout.total_seconds()
    with _opened(pid) as file:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            _wait(pid, give_up_at, timeout)
        text = _written(pid, _SIGNAL, file, give_up_at, timeout)
        if text.endswith(_MORE_THREADS):
            text = text.removesuffix(_MORE_THREADS) + "\n"
            text += _written(pid, _MAIN_SIGNAL, file, give_up_at, timeout)
    return [each.strip("\n") for each in _THREAD.split(text)[:0:-1]]


def _written(pid: int, number: int, file: int, give_up_at: float, timeout: timedelta) -> str:
    """Sends a signal to a process, and returns the text that its handler writes to `file`."""
    os.ftruncate(file, 0)
    before = _blocking(pid, number)
    os.kill(pid, number)
    while not os.fstat(file).st_size or _is_pending(pid, number) or _blocking(pid, number) - before:
        _wait(pid, give_up_at, timeout)
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")


def serving_children(pid: int) -> list[int]:
    """Returns the descendants of a process that serve their stacks."""
    found = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # that thread has ended
            for child in map(int, listing.read_text().split()):
                with contextlib.suppress(OSError):
                    if _has(Path(f"/proc/{child}/status"), "SigCgt", _SIGNAL):
                        found.append(child)
                found += serving_children(child)
    return found


@contextlib.contextmanager
def _opened(pid: int) -> Iterator[int]:
    """Yields a descriptor of the file that contains a process's stacks."""
    try:
        if _has(Path(f"/proc/{pid}/status"), "SigCgt", _SIGNAL):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(link).startswith(f"/memfd:{_FILE}"):  # noqa: PTH115
                        break
            else:
                raise _not_served(pid)
        else:
            raise _not_served(pid)
        file = os.open(link, os.O_RDWR)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise UnknownResourceError(
            f"there is no process {pid} on this machine", reason="PROCESS_UNKNOWN"
        ) from error
    except PermissionError as error:
        raise PreconditionError(
            f"the stacks of pid {pid} cannot be read: {error}", reason="PROCESS_NOT_OURS"
        ) from error
    try:
        yield file
    finally:
        os.close(file)


def _not_served(pid: int) -> PreconditionError:
    return PreconditionError(
        f"pid {pid} does not serve its stacks: it has not called shoal.init() yet, or uses signal "
        f"{_SIGNAL} itself; `py-spy dump --pid {pid}` shows them"
    )


def _wait(pid: int, give_up_at: float, timeout: timedelta) -> None:
    if time.monotonic() > give_up_at:
        state = "it has ended"
        with contextlib.suppress(OSError):
            state = _field(Path(f"/proc/{pid}/status"), "State")
        raise DeadlineError(
            f"pid {pid} did not write its stacks within {timeout.total_seconds():g} s (its "
            f"state is {state})"
        )
    time.sleep(_POLL_S)


def _is_pending(pid: int, number: int) -> bool:
    with contextlib.suppress(OSError):
        return _has(Path(f"/proc/{pid}/status"), "ShdPnd", number)
    return False


def _blocking(pid: int, number: int) -> set[str]:
    """Returns the threads that block a signal. A thread blocks it while it runs the signal's
    handler."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # that thread has ended
            if _has(task / "status", "SigBlk", number):
                found.add(task.name)
    return found


def _has(status: Path, mask: str, number: int) -> bool:
    """Returns whether a mask in /proc/PID/status contains a signal."""
    return bool(int(_field(status, mask), 16) & 1 << (number - 1))


def _field(status: Path, name: str) -> str:
    """Returns a field of /proc/PID/status (proc(5))."""
    for line in status.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    raise ProcessLookupError(f"{status} has no {name}")
