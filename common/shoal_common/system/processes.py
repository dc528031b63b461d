"""Starts child processes that cannot outlive the process that started them, and measures the
processor time of children.

Linux only (prctl). Used for the embedded Redis server and by launchers. This module does not
supervise children: restarts, output and exit codes are left to the caller.

The kernel ties PR_SET_PDEATHSIG to the *thread* that started the child, not to its process: when
that thread ends, the child receives the signal. Start such a child on a thread that keeps running
for as long as the child may run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

# Runs in the child before the real program replaces it. A preexec_fn would do the same, but it runs
# between fork and exec in a copy of a process that may have other threads, where it can deadlock.
# The parent may have died before prctl; getppid() then already differs.
_TRAMPOLINE = """
import ctypes, os, sys
number, parent = int(sys.argv[1]), int(sys.argv[2])
if ctypes.CDLL(None, use_errno=True).prctl(1, number, 0, 0, 0) != 0:
    sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
if os.getppid() != parent:
    sys.exit("the parent process is gone")
os.execvp(sys.argv[3], sys.argv[3:])
"""


def tied_to_parent(
    command: Sequence[str], *, death_signal: signal.Signals = signal.SIGKILL
) -> list[str]:
    """Wraps `command` so that its process receives `death_signal` when the thread that starts it
    ends for any reason.

    The wrapper execs the program, so the program has the pid that Popen reports, and inherits the
    file descriptors in Popen's `pass_fds`. Call this function in the process that will start the
    command.
    """
    return [
        sys.executable,
        "-I",
        "-S",
        "-c",
        _TRAMPOLINE,
        str(int(death_signal)),
        str(os.getpid()),
        *command,
    ]


def cpu_s(pid: int) -> float:
    """Returns the processor time that a process has used, in seconds; 0 if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    # utime and stime (proc(5))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children_cpu_s() -> float:
    """Returns the processor time, in seconds, of this process's living children. Omits children
    that exit during the call."""
    used = 0.0
    for listing in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for pid in listing.read_text().split():
                used += cpu_s(int(pid))
    return used
