"""The frames that this process's threads are executing.

In Python 3.11, `sys._current_frames` can deadlock: it allocates objects while it holds a lock of
the interpreter, and an allocation may start a garbage collection. A collection that frees a
`threading.local`, or that lets another thread start or end, needs the same lock
(https://github.com/python/cpython/issues/106883). From 3.12 on, allocations do not start
collections.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from types import FrameType
from typing import Final

_DEADLOCKS: Final = sys.version_info < (3, 12)
_lock: Final = threading.RLock()
"""Held while collections are disabled, so that one thread at a time disables and enables them."""
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


def current_frames() -> dict[int, FrameType]:
    """Returns the innermost frame of each thread, by thread id. Callable from any thread."""
    if not _DEADLOCKS:
        return sys._current_frames()  # noqa: TID251
    with _lock:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()  # noqa: TID251
        finally:
            if enabled:
                gc.enable()
