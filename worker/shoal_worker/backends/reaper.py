"""Destroys process groups on threads of their own: their destructors join threads, which takes some 10 ms, or wait for what is unfinished.

A destructor that still runs when the interpreter finalizes ends the process with std::terminate. So the interpreter's exit waits for those
that run, and groups that still have something to do are left to the end of the process, undestroyed.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from datetime import timedelta

_lock = threading.Lock()
_running: dict[threading.Thread, tuple[list[object], threading.Event]] = {}
"""What is to be destroyed, and when. Guarded by the lock."""


def drop(references: list[object], *, when: threading.Event) -> None:
    """Clears `references`, which must be the last ones, on a new thread, once `when` is set. Returns at once."""

    def run() -> None:
        when.wait()
        references.clear()
        with _lock:
            _running.pop(thread, None)

    thread = threading.Thread(target=run, name="shoal-reaper", daemon=True)
    with _lock:
        _running[thread] = (references, when)
    thread.start()


def wait(timeout: timedelta) -> bool:
    """Waits for all that is being destroyed; False if some still is after `timeout`. Does not wait for groups that are not finished."""
    deadline = time.monotonic() + timeout.total_seconds()
    with _lock:
        running = dict(_running)
    destroyed = [thread for thread, (_, when) in running.items() if when.is_set()]
    for thread in destroyed:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in destroyed)


def _at_exit() -> None:
    wait(timedelta(seconds=5))
    with _lock:
        unfinished = [references for references, when in _running.values() if not when.is_set()]
    for references in unfinished:
        for reference in references:
            # Never destroyed: the destructor would wait for what the group still does.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(reference))


# Registered on import, so it runs after the exit handlers of those who use it. No daemon would do: handlers still start threads.
atexit.register(_at_exit)
