"""Child processes whose exit is detected immediately, and that leave no other processes behind.

Every child leads its own session, so that Ctrl-C on a terminal reaches only the launcher, which
then decides what to do. The kernel kills the child when the thread that started it ends for any
reason. When a child exits, the rest of its process group is killed before its pid is released. This
module neither restarts processes nor reads their output; `agent` and `output` do.

A `Child` belongs to the thread that created it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Final

from shoal_common.system.processes import tied_to_parent

_KILL_DEADLINE: Final = timedelta(seconds=10)


@dataclass(frozen=True)
class ExitStatus:
    """Exit status of a process."""

    code: int
    """Exit status as in a shell: the exit code, or 128 + the number of the signal."""
    signal: int = 0
    """Number of the signal that killed the process; 0 if none did."""

    @classmethod
    def from_returncode(cls, returncode: int) -> ExitStatus:
        """Converts a status from subprocess's convention, which represents a signal as a negative
        number."""
        return cls(returncode) if returncode >= 0 else cls(128 - returncode, -returncode)

    @property
    def ok(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        if not self.signal:
            return f"exit code {self.code}"
        try:
            return signal.Signals(self.signal).name
        except ValueError:
            return f"signal {self.signal}"


class Child:
    """A child process. It needs no further cleanup once `wait` or `poll` has returned its exit
    status."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        directory: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Starts the process with /dev/null as its standard input. If the program does not exist,
        the child exits with code 127, as in a shell. Raises OSError if the interpreter itself
        cannot be started."""
        process = subprocess.Popen(
            tied_to_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=dict(environment),
            cwd=directory,
            start_new_session=True,
            pass_fds=pass_fds,
        )
        self._own(process.pid, command, process.stdout, process.stderr, process.wait)

    @classmethod
    def adopted(
        cls, pid: int, *, command: Sequence[str], stdout: IO[bytes] | None, stderr: IO[bytes] | None
    ) -> Child:
        """Wraps a process that the kernel has made a child of this process.

        The process must lead its own session, and be killed by the kernel when this process exits.
        `stdout`, `stderr`: read ends of its pipes. Raises ProcessLookupError or ChildProcessError
        if there is no such child.
        """
        child = cls.__new__(cls)
        child._own(
            pid, command, stdout, stderr, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        )
        os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return child

    def _own(
        self,
        pid: int,
        command: Sequence[str],
        stdout: IO[bytes] | None,
        stderr: IO[bytes] | None,
        reap: Callable[[], int],
    ) -> None:
        self.command = tuple(command)
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.stdout, self.stderr = stdout, stderr
        self._wait = reap
        """Function that blocks until the process has exited, reaps it, and returns its status in
        subprocess's convention."""
        self.status: ExitStatus | None = None
        """Exit status; None until the process has been reaped."""

    def poll(self) -> ExitStatus | None:
        """Returns the exit status if the process has exited, otherwise None. Does not block."""
        if (
            self.status is None
            and os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        ):
            # The process has not been reaped yet, so no other process or group can have its id.
            self._kill_group()
            self.status = ExitStatus.from_returncode(self._wait())
            os.close(self.pidfd)
        return self.status

    async def wait(self) -> ExitStatus:
        """Waits, without a time limit, until the process has exited. Must be awaited on the thread
        that created the child."""
        if (status := self.poll()) is not None:
            return status
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self.pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self.pidfd)
        status = self.poll()
        assert status is not None, "a pidfd is readable only when its process has ended"
        return status

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process, but not to its descendants, which the process must stop
        itself. Does nothing if the process has exited."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """Kills the process and its group with SIGKILL."""
        if self.status is None:
            self._kill_group()
            self.send(signal.SIGKILL)

    def reap(self) -> None:
        """Blocks until the process has exited. The caller must have made sure that it will exit."""
        if self.status is None:
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
            self.poll()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def wait_all(children: Iterable[Child], timeout: timedelta) -> list[Child]:
    """Blocks until all children have exited or `timeout` has passed. Returns the children that are
    still running."""
    left = [child for child in children if child.poll() is None]
    deadline = time.monotonic() + timeout.total_seconds()
    while left:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        poller = select.poll()
        for child in left:
            poller.register(child.pidfd, select.POLLIN)
        poller.poll(remaining * 1000)
        left = [child for child in left if child.poll() is None]
    return left


def stop_all(children: Sequence[Child], *, grace: timedelta) -> None:
    """Stops processes and blocks until they have exited. Sends SIGTERM and, after `grace`, SIGKILL.
    Processes that the children have left running get SIGKILL too.

    Raises DeadlineError if a process does not exit within 10 s of SIGKILL because it is stuck in
    the kernel.
    """
    offspring = [
        process for child in children if child.poll() is None for process in descendants(child.pid)
    ]
    try:
        for child in children:
            child.send(signal.SIGTERM)
        for child in wait_all(children, grace):
            child.kill()
        stuck = [
            f"{child.pid} ({' '.join(child.command[:4])})"
            for child in wait_all(children, _KILL_DEADLINE)
        ]
        for process in offspring:
            process.kill()
        stuck += [str(process.pid) for process in offspring if not process.wait(_KILL_DEADLINE)]
    finally:
        for process in offspring:
            process.close()
    if stuck:
        from shoal_common.errors import DeadlineError

        raise DeadlineError(
            f"processes still running {_KILL_DEADLINE.total_seconds():g} s after SIGKILL: "
            f"{', '.join(stuck)}"
        )


class Handle:
    """Reference to a process that is not a child of this process. It holds a pidfd, so that it
    never refers to a later process with the same pid."""

    def __init__(self, pid: int) -> None:
        """Opens a reference to the process. Raises ProcessLookupError if the process does not
        exist."""
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process; does nothing if it has exited. Raises PermissionError for
        a different user's process."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def kill(self) -> None:
        """Kills the process with SIGKILL; does nothing if it has exited. Raises PermissionError for
        a different user's process."""
        self.send(signal.SIGKILL)

    def wait(self, timeout: timedelta) -> bool:
        """Waits for the process. Returns whether it exited within `timeout`."""
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(timeout.total_seconds() * 1000))

    def close(self) -> None:
        os.close(self._fd)


def descendants(pid: int) -> list[Handle]:
    """Returns the descendants of `pid`, parents before children. Omits descendants whose parent has
    exited, since init has adopted them."""
    found: list[Handle] = []
    pending = [pid]
    while pending:
        for child in _children(pending.pop(0)):
            with contextlib.suppress(ProcessLookupError):
                found.append(Handle(child))
                pending.append(child)
    return found


def _children(pid: int) -> list[int]:
    numbers: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                numbers += [int(number) for number in (task / "children").read_text().split()]
    return numbers


def start_ticks(pid: int) -> int | None:
    """Returns the start time of a process in clock ticks since boot; None if there is no such
    process. Together with the pid, it identifies a process uniquely."""
    try:
        # The second field is the program's name in parentheses, which may contain any characters.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
