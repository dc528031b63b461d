"""A command in a bundle of a Ray cluster, the actor that starts it, and its input and output files.

The actor runs on the bundle's machine. Its command is a separate process, since a launcher needs a
main thread and does not need Ray. The command's output becomes the actor's output, which Ray shows
to the driver. When the actor is killed, or its machine's raylet dies, the kernel kills the command
and its descendants. This module imports nothing from Ray.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

from shoal_common.exit_status import EVICTED, PREEMPTED
from shoal_common.system.scratch import ScratchDirectory

from shoal.launcher.processes.process import Child, Handle, stop_all, wait_all

DIRECTORY: Final = "SHOAL_RAY_DIRECTORY"
"""Environment variable with the path of the directory shared by the command and the actor. Only
this user can read the directory."""
HERE: Final = "{directory}"
"""Placeholder for the shared directory in the arguments of a command."""
SUMMARY: Final = "summary.left"
"""Name of the file, in the shared directory, with a human-readable description of the launcher's
failed workers."""
PATH: Final = "path.json"
"""Name of the file, in the shared directory, with the actor's sys.path, which Ray has copied from
the driver."""
_KEPT_MOST: Final = timedelta(minutes=1)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command for an actor to run: `python -m MODULE ARGUMENTS`, with the Python interpreter of
    the actor's machine."""

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    """Variables that are added to the actor's environment. They may contain secrets, unlike the
    arguments, which are visible to all users."""
    files: Mapping[str, bytes] = field(repr=False, default_factory=dict)
    """Name -> content of files that are written to the command's directory before it starts."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Result of a command that has exited."""

    status: int
    """Exit status as in a shell."""
    host: str
    files: Mapping[str, bytes] = field(repr=False)
    """Name -> content of the files, with names ending in .left, that the command has written to its
    directory."""

    @property
    def was_ended(self) -> bool:
        """True if the launcher was ended by something other than its script, such as a signal or an
        eviction (docs/exit-status.md)."""
        return self.status == EVICTED or self.status > 128

    @property
    def has_failed(self) -> bool:
        """True if the launcher exited because its own workers failed. Other launchers exit with
        status 1 when the job has failed, or when they start too late."""
        return self.status not in (0, EVICTED, PREEMPTED) and SUMMARY in self.files


class CommandActor:
    """Actor that runs one command at a time. `run` occupies one of the actor's threads; the other
    methods run on a second thread."""

    def __init__(self, name: str) -> None:
        """`name`: text that Ray shows before each output line."""
        self._name = name
        self._scratch = ScratchDirectory("ray")
        """Directory of all commands. It is kept between commands, so that a restarted server finds
        its data, and is removed with the actor."""
        self._lock = threading.Lock()
        self._handle: Handle | None = None
        """Process of the running command; None if none is running."""
        self._stopped = False

    def __repr__(self) -> str:
        return self._name

    def run(self, command: Command) -> Ended:
        """Runs a command until it exits, and returns the result. Raises OSError if the command
        cannot be started."""
        directory = self._scratch.path
        for path in directory.glob("*.left"):
            path.unlink()
        for name, content in {PATH: json.dumps(sys.path).encode(), **command.files}.items():
            (directory / name).write_bytes(content)
        status = self._run(command, directory)
        left = {path.name: path.read_bytes() for path in directory.glob("*.left")}
        return Ended(status=status, host=socket.gethostname(), files=left)

    def _run(self, command: Command, directory: Path) -> int:
        arguments = [argument.replace(HERE, str(directory)) for argument in command.arguments]
        with self._lock:
            if self._stopped:
                return PREEMPTED
            child = Child(
                # -P: the working directory has the user's files, which may be named like modules.
                [sys.executable, "-P", "-m", command.module, *arguments],
                environment={**os.environ, **command.environment, DIRECTORY: str(directory)},
                stdout=1,
                stderr=2,
            )
            handle = self._handle = Handle(child.pid)
        try:
            while wait_all([child], _KEPT_MOST):
                pass
            assert child.status is not None
            return child.status.code
        finally:
            with self._lock:
                self._handle = None
            handle.close()
            stop_all([child], grace=timedelta(0))

    def stop(self) -> None:
        """Sends SIGTERM to the running command or, if none is running, to the next one. A
        launcher's workers then leave at their next step boundary."""
        with self._lock:
            self._stopped = True
            if self._handle is not None:
                self._handle.send(signal.SIGTERM)

    def where(self) -> tuple[str, int]:
        """Returns the host name of the actor's machine, and the actor's process id. Any response
        shows that the actor is running."""
        return socket.gethostname(), os.getpid()
