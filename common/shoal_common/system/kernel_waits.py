"""Finds out what a thread is waiting for, according to the kernel: the file, pipe or lock of its
current system call.

It reads only /proc, so it never blocks on the file system or lock that the thread is waiting for.
It works for threads of this process and, where the kernel lets this user trace them, of its
descendants.
"""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Final

_X86_64: Final = {
    "read": (0, 17, 19, 295),  # read, pread64, readv, preadv
    "write": (1, 18, 20, 296),
    "open": (2, 257, 437),
    "stat": (4, 5, 6, 262, 332),
    "list": (78, 217),
    "flush": (74, 75, 277),
    "lock a file": (72, 73),
    "sleep": (35, 230),
    "wait for a child": (61, 247),
    "network": (42, 43, 44, 45, 46, 47, 288, 299, 307),
    "poll": (7, 23, 232, 270, 271, 281),
    "futex": (202,),
}
_AARCH64: Final = {
    "read": (63, 65, 67, 69),
    "write": (64, 66, 68, 70),
    "open": (56, 437),
    "stat": (79, 80, 291),
    "list": (61,),
    "flush": (82, 83, 84),
    "lock a file": (25, 32),
    "sleep": (101, 115),
    "wait for a child": (95, 260),
    "network": (202, 203, 206, 207, 211, 212, 242, 243, 269),
    "poll": (22, 72, 73),
    "futex": (98,),
}
_CALLS: Final = {
    number: kind
    for kind, numbers in {"x86_64": _X86_64, "aarch64": _AARCH64}.get(
        platform.machine(), {}
    ).items()
    for number in numbers
}
"""Kinds of system calls by their numbers; empty on other machines."""
_PATH_FIRST: Final = frozenset({2, 4, 6} if platform.machine() == "x86_64" else ())
"""System calls whose first argument is the path. For other calls of the kinds open and stat, it is
the second one."""
_LONGEST_PATH: Final = 100
_OUTPUTS: Final = {1: "standard output", 2: "standard error"}


class KernelWait:
    """Finds out what a stalled thread is waiting for. Compares successive calls to `look`, so that
    a brief wait for the GIL is not reported."""

    def __init__(self) -> None:
        self._before: tuple[int, str] = (0, "")

    def look(self, thread: int) -> str:
        """Returns what a thread of this process is waiting for (`kernel_wait`).

        A lock is reported only from the second call on, and only if the thread has been asleep
        since the first call. Otherwise a thread that computes in Python, and therefore briefly
        waits for the GIL, would seem to be waiting. `thread`: the thread's id in the kernel.
        """
        found = kernel_wait(thread)
        before, self._before = self._before, (thread, _switches(thread))
        return "" if found == _LOCK and before != self._before else found


def kernel_wait(thread: int, *, pid: int | None = None) -> str:
    """Returns a human-readable description of what a thread is waiting for, such as "reading a
    pipe" or "sleeping"; empty if it is computing or the cause is unknown.

    `thread`: the thread's id in the kernel. `pid`: process of the thread; None: this process.
    """
    process = Path(f"/proc/{'self' if pid is None else pid}")
    try:
        number, *arguments = (process / "task" / str(thread) / "syscall").read_text().split()
        kind = _CALLS.get(int(number))
        values = [int(argument, 16) for argument in arguments[:2]]
    except (OSError, ValueError):  # the thread is running, has ended, or may not be inspected
        return ""
    if kind is None or len(values) < 2:
        return ""
    return _WORDS[kind] if kind in _WORDS else _of_file(process, kind, int(number), values)


def process_state(pid: int) -> str:
    """Returns the kernel's state of a process, such as "S (sleeping)" or "T (stopped)"; empty if
    the process has ended."""
    return _field(Path(f"/proc/{pid}/status"), "State")


def _switches(thread: int) -> str:
    """Returns how many times a thread of this process has gone to sleep, as text; empty if the
    thread has ended."""
    return _field(Path(f"/proc/self/task/{thread}/status"), "voluntary_ctxt_switches")


def _field(status: Path, name: str) -> str:
    with contextlib.suppress(OSError):
        for line in status.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""


_LOCK: Final = "waiting for a lock or another thread"
_WORDS: Final = {
    "sleep": "sleeping",
    "wait for a child": "waiting for a child process",
    "network": "waiting for the network",
    "poll": "waiting for input or the network",
    "futex": _LOCK,
}


def _of_file(process: Path, kind: str, number: int, values: list[int]) -> str:
    if kind in ("open", "stat") and number not in _FROM_DESCRIPTOR:
        path = _string(process, values[0 if number in _PATH_FIRST else 1])
        return f"{'opening' if kind == 'open' else 'looking up'} {path or 'a file'}"
    file = _file(process, values[0])
    if file.startswith("socket:"):
        return "waiting for the network"
    if kind == "read":
        return "reading standard input" if values[0] == 0 else f"reading {file}"
    if kind == "write":
        to = _OUTPUTS.get(values[0])
        return f"writing to {file}" if to is None else f"writing to {to}, which nobody reads"
    return {
        "stat": f"looking up {file}",
        "list": f"listing {file}",
        "flush": f"flushing {file} to disk",
        "lock a file": f"waiting for the lock of the file {file}",
    }[kind]


_FROM_DESCRIPTOR: Final = frozenset({5} if platform.machine() == "x86_64" else {80})
"""System calls of the kind stat whose first argument is a file descriptor."""


def _file(process: Path, descriptor: int) -> str:
    """Returns a description of an open file: its path, "a pipe", or "socket:" with a number."""
    try:
        target = os.readlink(process / "fd" / str(descriptor))  # noqa: PTH115
    except OSError:
        return "a file"
    return "a pipe" if target.startswith("pipe:") else target[-_LONGEST_PATH:]


def _string(process: Path, address: int) -> str:
    """Returns a string in the memory of a process; empty if it cannot be read."""
    try:
        memory = os.open(process / "mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        found = os.pread(memory, 4096 - address % 4096, address)
    except (OSError, OverflowError):
        return ""
    finally:
        os.close(memory)
    return found.partition(b"\0")[0].decode(errors="replace")[-_LONGEST_PATH:]
