"""Destroys process groups on a thread of their own: their destructors join threads, which takes some 10 ms.

A destructor that still runs when the interpreter finalizes ends the process with std::terminate, so the interpreter's exit waits for it.
"""

from __future__ import annotations

import atexit
import threading
import time
from datetime import timedelta

_running: set[threading.Thread] = set()
_lock = threading.Lock()


def drop(references: list[object]) -> None:
    """Clears `references`, which must be the last ones, on a new thread. Returns at once."""

    def run() -> None:
        references.clear()
        with _lock:
            _running.discard(thread)

    thread = threading.Thread(target=run, name="shoal-reaper", daemon=True)
    with _lock:
        _running.add(thread)
    thread.start()


def wait(timeout: timedelta) -> bool:
    """Waits for all that is being destroyed; False if some still is after `timeout`."""
    deadline = time.monotonic() + timeout.total_seconds()
    with _lock:
        running = list(_running)
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in running)


# Registered on import, so it runs after the exit handlers of those who use it. No daemon would do: handlers still start threads.
atexit.register(wait, timedelta(seconds=5))
