"""The loop of a rank that is a process: it receives tasks over JSON lines and runs them in order.
The other side is `processes.Rank`."""

from __future__ import annotations

import importlib
import json
import os
import socket
import traceback
from typing import Any

_connections: list[socket.socket] = []
"""To whoever tells tasks; the last one counts: an MPI rank serves its stub first, and its test
then."""


def say(**message: Any) -> None:
    _connections[-1].sendall((json.dumps(message) + "\n").encode())


def run_tasks(connection: socket.socket) -> None:
    """Runs tasks, named "module:function", until the other side hangs up."""
    _connections.append(connection)
    say(event="born", pid=os.getpid())
    with connection.makefile() as commands:
        for line in commands:
            command = json.loads(line)
            module, _, function = command["task"].partition(":")
            try:
                said = {
                    "result": getattr(importlib.import_module(module), function)(
                        **command["arguments"]
                    )
                }
            except Exception:  # the test shows it, whatever it is
                said = {"error": traceback.format_exc()}
            say(**said)
    _connections.pop()
