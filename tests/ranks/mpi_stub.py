"""The program that mpiexec starts. It passes its place in MPI's world to a process of the nursery,
which has already imported torch.

A process is a rank because of a socket that mpiexec left open for it and variables that name it.
This program uses only the standard library.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from pathlib import Path


def main(nursery: str) -> int:
    """Returns the exit status: 0 if the process did its tasks."""
    environment = {
        name: value for name, value in os.environ.items() if name.startswith(("PMI_", "MPI_"))
    }
    with (
        tempfile.TemporaryDirectory() as directory,
        socket.socket(socket.AF_UNIX) as rank,
        socket.socket(socket.AF_UNIX) as handover,
    ):
        path = str(Path(directory) / "socket")
        handover.bind(path)
        handover.listen()
        rank.connect(nursery)
        command = {
            "task": "tests.ranks.mpi:take_place",
            "arguments": {"handover": path, "environment": environment, "tasks": sys.argv[2]},
        }
        rank.sendall((json.dumps(command) + "\n").encode())
        taker, _ = handover.accept()
        with taker:
            socket.send_fds(taker, [b"."], [int(environment["PMI_FD"])])
        with rank.makefile() as said:
            outcome = [json.loads(said.readline()) for _ in ("born", "result")][-1]
    print(outcome.get("error", ""), file=sys.stderr)
    return 0 if "result" in outcome else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
