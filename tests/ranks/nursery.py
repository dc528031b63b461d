"""The nursery: a child of the zygote (tests/zygote) that forks a rank for each connection to its
socket.

It has no threads and no channels, which could not be forked. It ends when it is killed, and its
ranks end with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Sequence
from typing import NoReturn

# loaded once, before the forks
import shoal_worker.compression
import shoal_worker.pipelining.rank_pipeline  # noqa: F401

from tests.ranks.tasks import run_tasks


def serve(arguments: Sequence[str]) -> NoReturn:
    """Serves connections until the process is killed. `arguments`: the path of the socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit statuses of ranks are not needed
    with socket.socket(socket.AF_UNIX) as nursery:
        nursery.bind(arguments[0])
        nursery.listen()
        os.write(1, b"ready\n")
        while True:
            connection, _ = nursery.accept()
            with connection:
                if os.fork() == 0:
                    nursery.close()
                    # PR_SET_PDEATHSIG: the rank ends with the nursery
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    run_tasks(connection)
                    os._exit(0)
