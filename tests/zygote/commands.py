"""The command `shoal` in a forked process, which in turn forks its Python processes: its services,
its warm process and elastic workers.

Two helpers are forked while the process has one thread. One serves requests for processes as the
product's warm process does (`shoal.warm`), and the other becomes the warm process of a run. Other
processes, and everything that depends on an interpreter's start, are started fresh.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from shoal.cli import main
from shoal.launcher.processes.process import Child
from shoal.launcher.workers import warm
from shoal.launcher.workers.environment import is_own_of_worker
from shoal.launcher.workers.warm_commands import _FOLLOWED, _READ_BY_IMPORTS, folder_of
from shoal.warm.becoming import show_as
from shoal.warm.forking import serve
from shoal.warm.messages import receive, send

from tests.zygote.children import HELPER

_STARTING = ("run", "up", "coordinate")
"""Commands that start processes."""
_SERVICES = ("shoal_coordinator", "shoal_ps_server")
_WORKER = "elastic_worker.py"
_PATIENCE_S = 60.0


def can_be_forked(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Returns whether a fork of this process in its environment is equivalent to a fresh process of
    the command."""
    differing = {
        name for name, _ in environment.items() ^ os.environ.items() if not is_own_of_worker(name)
    } - warm._OF_WORKERS
    return command[0] == sys.executable and not any(
        name in _FOLLOWED or name.startswith(_READ_BY_IMPORTS) for name in differing
    )


def shoal(arguments: Sequence[str]) -> None:
    """Runs `python -m shoal ARGUMENTS`."""
    if arguments and arguments[0] in _STARTING:
        _fork_what_is_started()
    sys.argv[:] = [str(Path(warm.__file__).parents[1] / "__main__.py"), *arguments]
    main()


def end(status: object) -> NoReturn:
    """Ends the process as the interpreter does, except for unloading all imported modules, which
    takes a second."""
    try:
        threading._shutdown()
    except BaseException:
        # The interpreter prints the error as well, and continues with the exit handlers.
        traceback.print_exc()
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    if isinstance(status, str):
        print(status, file=sys.stderr)
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 0 if status is None else 1)


def run_to_its_end(program: Callable[[], Any]) -> NoReturn:
    """Runs the program, prints what it raises, and ends the process with its status."""
    status: object = 1
    try:
        status = program()
    except SystemExit as ending:
        status = ending.code
    except BaseException:
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as ending:
            status = ending.code
    end(status)


def _fork_what_is_started() -> None:
    launcher = os.getpid()
    services = _Helper(
        lambda connection: run_to_its_end(serve(connection.detach(), launcher=launcher).run)
    )
    next_warm = [_Helper(lambda connection: _become_warm(connection, launcher=launcher))]
    receive(services.connection)  # the helper is ready
    start_fresh = Child.__init__

    def start(
        child: Child, command: Sequence[str], *, environment: Mapping[str, str], **how: Any
    ) -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        if blocked or how.get("directory") is not None or not can_be_forked(command, environment):
            start_fresh(child, command, environment=environment, **how)
        elif warm._PROGRAM in command and next_warm:
            next_warm.pop().become(
                child, command, environment, int(command[command.index(warm._PROGRAM) + 1])
            )
        elif (command[1] == "-P" and command[3] in _SERVICES) or Path(command[2]).name == _WORKER:
            services.fork(child, command, environment, how["stdout"], how["stderr"])
        else:
            start_fresh(child, command, environment=environment, **how)

    Child.__init__ = start


class _Helper:
    """A helper process that shares a socket with this process."""

    def __init__(self, program: Callable[[socket.socket], object]) -> None:
        self.connection, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self.connection.close()
            show_as([HELPER], os.environ)
            ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
            program(theirs)
            os._exit(0)
        theirs.close()
        self.connection.settimeout(_PATIENCE_S)

    def fork(
        self,
        child: Child,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
    ) -> None:
        """Makes `child` a process of the command."""
        with contextlib.ExitStack() as given:
            their_gate, gate = warm._pipe(given, given)
            ends = [
                (None, each)
                if not isinstance(each, int)
                else warm._pipe(contextlib.ExitStack(), given)
                for each in (stdout, stderr)
            ]
            request = {
                "command": list(command),
                "environment": dict(environment),
                "folder": folder_of(command),
            }
            with warm._adopting():
                send(
                    self.connection,
                    request,
                    (ends[0][1].fileno(), ends[1][1].fileno(), their_gate.fileno()),
                )
                answer, _ = receive(self.connection)
            pid = answer["pid"]
            child._own(
                pid,
                command,
                ends[0][0],
                ends[1][0],
                lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]),
            )
            with contextlib.suppress(BrokenPipeError):  # the helper has been killed
                os.write(gate.fileno(), b"+")

    def become(
        self, child: Child, command: Sequence[str], environment: Mapping[str, str], descriptor: int
    ) -> None:
        """Makes `child` this helper, which runs the command and serves the socket `descriptor`."""
        with contextlib.ExitStack() as given:
            (out, theirs_out), (error, theirs_error) = (
                warm._pipe(contextlib.ExitStack(), given) for _ in range(2)
            )
            message = {"command": list(command), "environment": dict(environment)}
            send(self.connection, message, (descriptor, theirs_out.fileno(), theirs_error.fileno()))
        self.connection.close()
        child._own(
            self._pid,
            command,
            out,
            error,
            lambda: os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]),
        )


def _become_warm(connection: socket.socket, *, launcher: int) -> None:
    """Waits until the launcher requests its warm process, and becomes it."""
    os.setsid()
    try:
        message, (descriptor, *outputs) = receive(connection)
    except (EOFError, ConnectionResetError):  # the launcher has ended
        return
    # waits until the launcher, which may still be sending, has closed the socket
    connection.recv(1)
    connection.close()
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
        os.close(output)
    os.environ.clear()
    os.environ.update(message["environment"])
    show_as(message["command"], message["environment"])
    run_to_its_end(serve(descriptor, launcher=launcher).run)
