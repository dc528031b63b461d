"""The nursery: a process that has imported torch and Shoal, which takes seconds, and forks a rank
for each connection to its socket.

It has no threads and no channels, which could not be forked. It ends when it is killed, and its
ranks end with it.
"""

from __future__ import annotations

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import ctypes
import gc
import signal
import socket
import sys

import shoal  # noqa: F401 - loaded once, before the forks
import shoal_worker.compression
import shoal_worker.pipelining.rank_pipeline  # noqa: F401 - the same
import torch
import torch._dynamo

from tests.ranks.tasks import run_tasks


def serve(path: str) -> None:
    """Serves connections until the process is killed."""
    torch.set_num_threads(1)
    # the first optimizer imports parts of torch for a second
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    gc.collect()
    gc.freeze()  # otherwise each rank's garbage collector would visit and thereby copy all objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit statuses of ranks are not needed
    with socket.socket(socket.AF_UNIX) as nursery:
        nursery.bind(path)
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


if __name__ == "__main__":
    serve(sys.argv[1])
