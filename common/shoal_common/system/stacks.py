"""Reads the Python stacks of other processes of the same user, without ptrace.

A process that calls `serve_stacks` opens a file in memory. When a real-time signal arrives,
`faulthandler` writes the stacks of all threads to the file. This handler is C code, so it works
even while a thread holds Python's lock. `read_stacks` opens the file through /proc, sends the
signal, and waits until the handler has returned. Children that the process forks (data workers)
inherit the file and the handler. As with any signal, a system call in progress may return early;
Python retries it (PEP 475). Linux only.
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
_FILE: Final = "shoal-stacks"
_MASK: Final = 1 << (_SIGNAL - 1)
"""Bit that represents the signal in the masks of /proc/PID/status."""
_POLL_S: Final = 0.005
_THREAD: Final = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)


@cache
def serve_stacks() -> bool:
    """Allows other processes of this user to read this process's stacks from now on. Must be called
    at most once per process.

    Returns False, and changes nothing, if the signal is in use or the system has no files in
    memory.
    """
    if signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return False
    try:
        file = os.memfd_create(_FILE, os.MFD_CLOEXEC)
    except OSError:
        return False
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # a reader may have emptied the file
    faulthandler.register(_SIGNAL, file=file, all_threads=True, chain=False)
    return True


def read_stacks(pid: int, *, timeout: timedelta = timedelta(seconds=5)) -> list[str]:
    """Returns the stacks of a process's threads, in the format of faulthandler: the main thread
    first, each stack with the innermost call first.

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
        os.ftruncate(file, 0)
        before = _blocking(pid)
        os.kill(pid, _SIGNAL)
        while not os.fstat(file).st_size or _is_pending(pid) or _blocking(pid) - before:
            _wait(pid, give_up_at, timeout)
        text = os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
    return [each.strip("\n") for each in _THREAD.split(text)[:0:-1]]


def serving_children(pid: int) -> list[int]:
    """Returns the descendants of a process that serve their stacks."""
    found = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # that thread has ended
            for child in map(int, listing.read_text().split()):
                with contextlib.suppress(OSError):
                    if _mask(Path(f"/proc/{child}/status"), "SigCgt") & _MASK:
                        found.append(child)
                found += serving_children(child)
    return found


@contextlib.contextmanager
def _opened(pid: int) -> Iterator[int]:
    """Yields a descriptor of the file that contains a process's stacks."""
    try:
        if _mask(Path(f"/proc/{pid}/status"), "SigCgt") & _MASK:
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


def _is_pending(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(_mask(Path(f"/proc/{pid}/status"), "ShdPnd") & _MASK)
    return False


def _blocking(pid: int) -> set[str]:
    """Returns the threads that block the signal. A thread blocks it while it runs the signal's
    handler."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # that thread has ended
            if _mask(task / "status", "SigBlk") & _MASK:
                found.add(task.name)
    return found


def _mask(status: Path, name: str) -> int:
    return int(_field(status, name), 16)


def _field(status: Path, name: str) -> str:
    """Returns a field of /proc/PID/status (proc(5))."""
    for line in status.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    raise ProcessLookupError(f"{status} has no {name}")
