"""Keeps the threads of a test on one core.

Where ranks are threads, one of them computes while the others wait for it or for the interpreter's
lock. If they are on several cores, each change wakes another core: on two busy cores, such tests
take 10 to 25% more CPU time and up to twice as long.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keeps the calling thread, and the threads and processes that it starts, on one core. Prefers
    a core that no other test process has chosen. Does nothing where affinity cannot be set."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    with contextlib.ExitStack() as held:
        held.callback(os.sched_setaffinity, 0, allowed)
        os.sched_setaffinity(0, {_reserve(sorted(allowed), held)})
        yield


def _reserve(cores: list[int], held: contextlib.ExitStack) -> int:
    """Returns the first core that is free, and reserves it until `held` is closed. If all are
    reserved, returns one that depends on the process."""
    for core in cores:
        path = Path(tempfile.gettempdir()) / f"shoal-tests-{os.getuid()}-core-{core}.lock"
        file = path.open("w")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
        else:
            held.enter_context(file)
            return core
    return cores[os.getpid() % len(cores)]
