"""A command in a place that Ray has found for it: the actor that starts it, and what goes to it and
comes back.

The actor lives on the bundle's machine, and its command is a process of its own, since launchers
want a main thread and no Ray. What the command prints goes where the actor's output goes, which Ray
shows to the driver. When the actor is killed, or its machine's raylet dies, the kernel kills the
command, and what that has started. Nothing here is imported from Ray.
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

from shoal_common.exit_status import PREEMPTED, PUT_OUT
from shoal_common.scratch import ScratchDirectory

from shoal.launcher.process import Child, Handle, stop_all, wait_all

DIRECTORY: Final = "SHOAL_RAY_DIRECTORY"
"""Variable of the command: the directory that it shares with its actor, which only this user can
read."""
HERE: Final = "{directory}"
"""Stands for that directory in a command's arguments."""
SUMMARY: Final = "summary.left"
"""File in it: which of a launcher's workers failed, for people."""
PATH: Final = "path.json"
"""File in it: sys.path of the actor, which Ray has set up as the driver's is."""
_KEPT_MOST: Final = timedelta(minutes=1)


@dataclass(frozen=True, kw_only=True)
class Command:
    """What an actor runs: `python -m MODULE ARGUMENTS`, with the Python of its machine."""

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    """Added to the actor's; it may hold secrets, unlike the arguments."""
    files: Mapping[str, bytes] = field(repr=False, default_factory=dict)
    """Name -> content, in the command's directory before it starts."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    status: int
    """The exit status that a shell would give."""
    host: str
    files: Mapping[str, bytes] = field(repr=False)
    """Files ending in .left that it has left in its directory."""

    @property
    def was_ended(self) -> bool:
        """Whether a launcher ended for what happened to it, and not for what its script did
        (docs/exit-status.md)."""
        return self.status == PUT_OUT or self.status > 128

    @property
    def has_failed(self) -> bool:
        """Whether a launcher ended for what its own workers did: others end with 1 when the job has
        failed, or come too late."""
        return self.status not in (0, PUT_OUT, PREEMPTED) and SUMMARY in self.files


class CommandActor:
    """Runs one command at a time. `run` blocks on one of the actor's threads, the others are called
    on another."""

    def __init__(self, name: str) -> None:
        """`name` is what Ray shows before each line of output."""
        self._name = name
        self._scratch = ScratchDirectory("ray")
        """Kept for the next command, so that a server which has ended finds its data; gone with the
        actor."""
        self._lock = threading.Lock()
        self._handle: Handle | None = None
        """The command's process, while it runs."""
        self._stopped = False

    def __repr__(self) -> str:
        return self._name

    def run(self, command: Command) -> Ended:
        """Runs it to its end. Raises OSError when it cannot be started."""
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
                [sys.executable, "-m", command.module, *arguments],
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
        """SIGTERM to the command, or to the one that would be run next: a launcher's workers leave
        at their next border."""
        with self._lock:
            self._stopped = True
            if self._handle is not None:
                self._handle.send(signal.SIGTERM)

    def where(self) -> tuple[str, int]:
        """The host name of its machine, and its process id there: who answers runs."""
        return socket.gethostname(), os.getpid()
