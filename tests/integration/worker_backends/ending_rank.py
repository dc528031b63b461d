"""A rank of two over Gloo that ends while it has something to do with its peer. Arguments: a
store's file, what it has to do, the rank.

Rank 0 raises. While its interpreter finalizes it waits for its standard input to end; rank 1 ends
before that. What Gloo still has to say, it says then.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any, Final

import torch
from shoal_worker.backends.gloo.backend import GlooBackend
from torch.distributed import FileStore

_MOMENT_S: Final = 0.5
"""In which Gloo's threads notice that the peer has gone: nothing tells when they have."""


class _Lingering:
    """Takes its time when the interpreter finalizes, and lets other threads run meanwhile, as the
    destructors of a large program do."""

    def __init__(self) -> None:
        self._write, self._read, self._sleep = os.write, os.read, time.sleep

    def __del__(self) -> None:
        self._write(2, b"finalizing\n")
        self._read(0, 1)
        self._sleep(_MOMENT_S)


def main() -> None:
    path, what, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    limit = timedelta(seconds=60)
    backend = GlooBackend()
    backend.initialize(
        rank=rank, world_size=2, store=FileStore(path, 2), timeout=limit, connect_timeout=limit
    )
    group: Any = backend.process_group
    if rank == 1:
        print("waits", flush=True)
        sys.stdin.readline()
        os._exit(0)
    # Never closed by the script. What hangs on sys is destroyed last, when no thread may come back
    # to Python any more.
    setattr(sys, "kept", [backend, _Lingering()])  # noqa: B010 - mypy knows no such attribute
    match what:
        case "callback":
            group.allreduce([torch.ones(100_000)]).get_future().add_done_callback(lambda _: None)
        case "message":
            work = group.recv([torch.ones(100_000)], 1, 0)
            group.waiter.wait_for(lambda: work._native.wait(limit))
    raise ValueError("a fault in the script")


main()
