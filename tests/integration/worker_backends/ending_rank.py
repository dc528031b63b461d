"""One of two ranks over Gloo that ends while an operation with its peer is in flight. Arguments: a
store's file, the operation, the rank.

Rank 0 raises. During its finalization, the interpreter waits for standard input to end, which is
after the end of rank 1. Gloo reports the lost peer at that time.
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
"""Time for Gloo's threads to notice that the peer has gone, which has no observable event."""


class _Lingering:
    """Delays the interpreter's finalization and lets other threads run meanwhile, like the
    destructors of a large program."""

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
    # The script never closes it. Attributes of sys are destroyed last, when no thread may enter
    # Python any more.
    setattr(sys, "kept", [backend, _Lingering()])  # noqa: B010 - mypy knows no such attribute
    match what:
        case "callback":
            group.allreduce([torch.ones(100_000)]).get_future().add_done_callback(lambda _: None)
        case "message":
            work = group.recv([torch.ones(100_000)], 1, 0)
            group.waiter.wait_for(lambda: work._native.wait(limit))
    raise ValueError("a fault in the script")


main()
