"""Starts workers by forking a warm process or, if that is impossible, in fresh interpreters.

The warm process (`shoal.warm`) starts with the run, imports torch while the launcher does other
work, and then forks each worker in milliseconds. In both cases a worker is a child of the launcher
(`process.Child`). If the warm process dies, workers start in fresh interpreters until the next warm
process is ready.

All objects belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Final

from shoal_common.system.processes import cpu_s

from shoal import warm
from shoal.launcher.processes.process import Child, ExitStatus, wait_all
from shoal.launcher.workers.environment import is_own_of_worker
from shoal.launcher.workers.warm_commands import folder_of, judge
from shoal.warm.messages import receive, send

_PROGRAM: Final = str(Path(warm.__file__).with_name("__main__.py"))
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_GET_CHILD_SUBREAPER: Final = 37
_IMPORT_TIMEOUT: Final = timedelta(seconds=180)
_LOOK: Final = timedelta(seconds=30)
"""Interval at which the processor time of a slow import is read."""
_BUSY_CPU_S: Final = 0.05
"""Processor time, in seconds, that an import must use in an interval to count as in progress."""
_FORK_TIMEOUT: Final = timedelta(seconds=20)
_EXIT_TIMEOUT: Final = timedelta(seconds=10)
_MOST_LAST_WORDS: Final = 4096
_SHORT_LIFE_S: Final = 5.0
_MOST_SHORT_LIVES: Final = 3
"""Maximum number of warm processes that may die soon after they were ready. After that, no further
warm process is started."""
_OF_WORKERS: Final = frozenset(
    {
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "OMP_NUM_THREADS",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    }
)
"""Variables that services do not receive, or receive with different values than workers. The forked
process applies them."""
_ADOPTING: Final = threading.Lock()
"""Lock held while this process is a subreaper, so that a launcher on a different thread does not
end that state too early."""


class WarmProcessError(Exception):
    """Raised if a worker could not be forked. The message contains the reason."""


class WarmWorkers:
    """Starts the workers of one run, by forking a warm process if possible."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        wanted: bool,
        note: Callable[[str], None],
    ) -> None:
        """Prepares the object; `begin` starts the warm process.

        Args:
            command: command line of each worker.
            environment: variables common to all workers.
            wanted: False to start all workers in fresh interpreters.
            note: callback that shows a message to the user.
        """
        self._environment = dict(environment)
        self._note = note
        self._noted: set[str] = set()
        self._settled = asyncio.Event()
        self._process: _WarmProcess | None = None
        """Warm process that can fork; None if there is none."""
        self._importing = 0
        """Process id of the newest warm process; 0 before the first."""
        self._keeping: asyncio.Task[None] | None = None
        verdict = judge(command, environment) if wanted else None
        self._usable = verdict is not None and verdict.warm
        if verdict is not None and verdict.reason:
            self._explain_fresh(verdict.reason)

    @property
    def is_ready(self) -> bool:
        """True if the next worker will be forked."""
        return self._process is not None

    @property
    def is_settled(self) -> bool:
        """True if the first warm process can fork, or it is certain that it never will."""
        return self._settled.is_set()

    def begin(self) -> None:
        """Starts the warm process, if one is wanted and can run the workers' command."""
        if self._usable:
            self._keeping = asyncio.get_running_loop().create_task(self._keep())
        else:
            self._settled.set()

    async def settled(self) -> None:
        """Waits until the first warm process can fork, or it is certain that it never will. Waits
        at most 3 minutes, or longer while the process is still importing: on a busy machine, fresh
        interpreters would each need even longer."""
        loop = asyncio.get_running_loop()
        give_up_at, used_s = loop.time() + _IMPORT_TIMEOUT.total_seconds(), 0.0
        while not self._settled.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK.total_seconds()):
                    await self._settled.wait()
            before_s, used_s = used_s, cpu_s(self._importing)
            if loop.time() >= give_up_at and used_s < before_s + _BUSY_CPU_S:
                break
        if not self._settled.is_set():
            self._explain_fresh(
                f"the warm process did not import torch within {_IMPORT_TIMEOUT.total_seconds():g} "
                "s"
            )
            self._settled.set()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Starts a worker, with pipes for its output. Raises OSError."""
        try:
            if (child := self._fork(command, environment)) is not None:
                return child
        except WarmProcessError as error:
            self._explain_fresh(str(error))
        return Child(
            command, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def start_service(
        self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> Child:
        """Starts one of Shoal's services with its output in `log`. The process is forked from the
        warm process or, if none is ready, started in a fresh interpreter. Raises OSError."""
        with contextlib.suppress(WarmProcessError):
            if (
                child := self._fork(command, environment, apart_from=_OF_WORKERS, log=log)
            ) is not None:
                return child
        return Child(command, environment=environment, stdout=log, stderr=log)

    def _fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        apart_from: frozenset[str] = frozenset(),
        log: IO[bytes] | None = None,
    ) -> Child | None:
        """Forks a process from the warm process; returns None if there is no warm process. Raises
        WarmProcessError.

        `apart_from`: variables whose values may differ from those in the warm process.
        """
        process = self._process
        if process is None:
            return None
        differing = {
            name for name, _ in _shared(environment).items() ^ _shared(self._environment).items()
        } - apart_from
        if differing:
            raise WarmProcessError(
                f"their value of {min(differing)} differs from that of the warm process"
            )
        try:
            return process.fork(command, environment, log)
        finally:
            if not process.answers:
                self._process = None

    async def close(self) -> None:
        """Stops the warm process. Workers keep running."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    def _explain_fresh(self, reason: str) -> None:
        if reason not in self._noted:
            self._noted.add(reason)
            self._note(f"workers start in fresh interpreters: {reason}")

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        short_lives = 0
        while short_lives < _MOST_SHORT_LIVES:
            try:
                process = _WarmProcess(self._environment)
            except OSError as error:
                self._explain_fresh(f"the warm process could not be started: {error}")
                self._settled.set()
                return
            self._importing = process.child.pid
            try:
                if problem := await process.problem():
                    self._explain_fresh(problem)
                    return
                self._process = process
                self._settled.set()
                ready_at = loop.time()
                status = await process.child.wait()
                self._note(
                    f"the warm process (pid {process.child.pid}) ended with {status}; workers "
                    "start in fresh interpreters until another is ready"
                )
                short_lives = short_lives + 1 if loop.time() - ready_at < _SHORT_LIFE_S else 0
            finally:
                self._process = None
                process.close()
                self._settled.set()
        self._explain_fresh(
            f"{_MOST_SHORT_LIVES} warm processes in a row ended within {_SHORT_LIFE_S:g} s"
        )


class _WarmProcess:
    """One warm process, from its start to its end."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Starts the process. Raises OSError."""
        self.answers = True
        """True while the process may still respond to requests."""
        self._connection, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-u", _PROGRAM, str(theirs.fileno()), str(os.getpid())]
            self.child = Child(
                command,
                environment=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
            )
        self._connection.settimeout(_FORK_TIMEOUT.total_seconds())
        self._printed = b""
        """Last part of the output of the warm process. It is read during the imports, because a
        full pipe would block the process."""

    async def problem(self) -> str:
        """Waits until the process can fork. Returns an empty string, or the reason if it cannot
        fork."""
        loop = asyncio.get_running_loop()
        said = asyncio.Event()
        loop.add_reader(self._connection, said.set)
        for stream in self._outputs:
            os.set_blocking(stream.fileno(), False)
            loop.add_reader(stream, self._read_output, stream)
        try:
            await said.wait()
        finally:
            for readable in (self._connection, *self._outputs):
                loop.remove_reader(readable)
        try:
            message, _ = receive(self._connection)
        except (EOFError, OSError):
            problem = f"the warm process ended with {await self._end()}"
        else:
            problem = message.get("failed", "")
        for stream in self._outputs:
            self._read_output(stream)
        if self._printed and not problem:
            problem = (
                "importing torch and Shoal printed output, which would be missing from the "
                "workers' output"
            )
        lines = self._printed.decode(errors="replace").strip().splitlines()
        return f"{problem} ({lines[-1]})" if problem and lines else problem

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None = None
    ) -> Child:
        """Forks a worker. `log`: file for its output; None: pipes.

        Raises WarmProcessError, after which no worker exists, and OSError if no file descriptors
        are left.
        """
        with contextlib.ExitStack() as given, contextlib.ExitStack() as kept:
            their_gate, gate = _pipe(given, given)
            out, theirs_out = _pipe(kept, given) if log is None else (None, log)
            error, theirs_error = _pipe(kept, given) if log is None else (None, log)
            request = {
                "command": list(command),
                "environment": dict(environment),
                "folder": folder_of(command),
            }
            try:
                with _adopting():
                    send(
                        self._connection,
                        request,
                        (theirs_out.fileno(), theirs_error.fileno(), their_gate.fileno()),
                    )
                    answer, _ = receive(self._connection)
            except (EOFError, OSError) as problem:
                self.answers = False
                # The warm process may still fork a worker. The worker exits when it finds its gate
                # closed.
                self.child.kill()
                raise WarmProcessError(
                    f"the warm process did not respond: {problem!r}"
                ) from problem
            if "pid" not in answer:
                raise WarmProcessError(answer["refused"])
            try:
                child = Child.adopted(answer["pid"], command=command, stdout=out, stderr=error)
            except OSError as problem:
                raise WarmProcessError(
                    f"process {answer['pid']} is not a child of the launcher: {problem}"
                ) from problem
            with contextlib.suppress(
                BrokenPipeError
            ):  # the process was killed; its status will show this
                os.write(gate.fileno(), b"+")
            kept.pop_all()
            return child

    def close(self) -> None:
        """Kills the warm process and blocks until it has exited, for at most 10 s. A process stuck
        in the kernel is left behind."""
        self._connection.close()
        self.child.kill()
        wait_all([self.child], _EXIT_TIMEOUT)
        for stream in self._outputs:
            stream.close()

    async def _end(self) -> ExitStatus:
        """Returns the exit status of a warm process that has closed its socket. If the process does
        not exit on its own, kills it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_TIMEOUT.total_seconds()):
                return await self.child.wait()
        self.child.kill()
        return await self.child.wait()

    @property
    def _outputs(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.child.stdout is not None
        assert self.child.stderr is not None
        return self.child.stdout, self.child.stderr

    def _read_output(self, stream: IO[bytes]) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(stream.fileno(), 1 << 16)
            self._printed = (self._printed + data)[-_MOST_LAST_WORDS:]
            if not data:
                asyncio.get_running_loop().remove_reader(stream)


def _pipe(
    reader: contextlib.ExitStack, writer: contextlib.ExitStack
) -> tuple[IO[bytes], IO[bytes]]:
    """Returns the read and write ends of a new pipe, which `reader` and `writer` close."""
    reading, writing = os.pipe()
    return reader.enter_context(os.fdopen(reading, "rb")), writer.enter_context(
        os.fdopen(writing, "wb", buffering=0)
    )


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Makes this process a subreaper within the block: when a worker's parent, a child of the warm
    process, exits, the kernel makes the worker a child of this process. Raises WarmProcessError.

    Other processes that lose their parent in these milliseconds become children of this process
    too, and stay in the process table until this process exits.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with _ADOPTING:
        before = ctypes.c_int()
        libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise WarmProcessError(
                f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}"
            )
        try:
            yield
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _shared(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not is_own_of_worker(name)}
