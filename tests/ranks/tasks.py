"""The loop of a rank that is a process: it receives tasks as JSON lines and runs them in order. The
other side is `processes.Rank`."""

from __future__ import annotations

import importlib
import json
import os
import socket
import traceback
from typing import Any

_connections: list[socket.socket] = []
"""Connections to the senders of tasks. The last one is used: an MPI rank first serves its stub and
then its test."""


def say(**message: Any) -> None:
    _connections[-1].sendall((json.dumps(message) + "\n").encode())


def run_tasks(connection: socket.socket) -> None:
    """Runs tasks named "module:function" until the other side closes the connection."""
    _connections.append(connection)
    say(event="born", pid=os.getpid())
    with connection.makefile() as commands:
        for line in commands:
            command = json.loads(line)
            module, _, function = command["task"].partition(":")
            try:
                message = {
                    "result": getattr(importlib.import_module(module), function)(
                        **command["arguments"]
                    )
                }
            except Exception:  # any exception: the test shows it
                message = {"error": traceback.format_exc()}
            say(**message)
    _connections.pop()
