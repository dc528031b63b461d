"""A process of the nursery as a rank of MPI's world."""

from __future__ import annotations

import os
import socket
from typing import Any

from tests.ranks.tasks import run_tasks


def own_rank() -> int:
    from mpi4py import MPI

    rank: int = MPI.COMM_WORLD.rank
    return rank


def take_place(handover: str, environment: dict[str, str], tasks: str) -> None:
    """Takes over a place in MPI's world from mpi_stub.py, and then runs tasks from the socket
    `tasks` until the other side closes it."""
    with socket.socket(socket.AF_UNIX) as giver:
        giver.connect(handover)
        _, (descriptor, *_), _, _ = socket.recv_fds(giver, 1, 1)
    os.environ.update(environment, PMI_FD=str(descriptor))
    with socket.socket(socket.AF_UNIX) as teller:
        teller.connect(tasks)
        run_tasks(teller)
    _finalize()


def _finalize() -> None:
    """Finalizes MPI explicitly, because this process ends without the interpreter's exit
    handlers."""
    from mpi4py import MPI

    finalize: Any = MPI.Finalize
    finalize()
