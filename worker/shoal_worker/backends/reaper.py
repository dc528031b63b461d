"""Threads of this process that are inside torch, where the interpreter must not finalize under them.

A thread that comes back from C++ to Python, or is called by C++, when the interpreter finalizes is ended on the spot; torch's frames do not
allow that, and the process ends by SIGABRT (std::terminate), whatever its exit status would have been. So the interpreter's exit waits for
the threads that were started here, and until no thread of Gloo's runs, which may call what a script or this package has asked it to call.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from shoal_worker.backends import gloo_threads

_MOST: Final = timedelta(seconds=5)

_lock = threading.Lock()
_running: dict[threading.Thread, float] = {}
"""Threads that were started here and have not ended, with the seconds that the interpreter's exit waits for each."""
_undestroyed: dict[threading.Thread, tuple[list[object], threading.Event]] = {}
"""Threads of `_running` that destroy something: what, and the event after which they do. The lock guards this and `_running`."""


def start(call: Callable[[], object], *, name: str, most_s: float = _MOST.total_seconds()) -> None:
    """Runs `call`, which calls torch and may take long there, on a thread called `name`. The exit waits for it, at most `most_s`."""
    _start(call, name, most_s)


def drop(references: list[object], *, when: threading.Event) -> None:
    """Clears `references`, which must be the last ones, on a new thread, once `when` is set. Returns at once.

    For process groups: their destructors join threads, which takes some 10 ms, or wait for what is unfinished.
    """

    def destroy() -> None:
        when.wait()
        references.clear()

    _start(destroy, "shoal-reaper", _MOST.total_seconds(), (references, when))


def wait(timeout: timedelta) -> bool:
    """Waits for all that runs; False if some still does after `timeout`. Does not wait for groups that are not finished."""
    started = time.monotonic()
    with _lock:
        waits = {thread for thread, (_, when) in _undestroyed.items() if not when.is_set()}
        running = [(thread, most_s) for thread, most_s in _running.items() if thread not in waits]
    for thread, most_s in running:
        thread.join(max(0.0, started + min(most_s, timeout.total_seconds()) - time.monotonic()))
    return not any(thread.is_alive() for thread, _ in running)


def _start(call: Callable[[], object], name: str, most_s: float, destroys: tuple[list[object], threading.Event] | None = None) -> None:
    def run() -> None:
        try:
            call()
        finally:
            with _lock:
                _running.pop(thread, None)
                _undestroyed.pop(thread, None)

    # Daemons: what never ends must not keep the process.
    thread = threading.Thread(target=run, name=name, daemon=True)
    with _lock:
        _running[thread] = most_s
        if destroys is not None:
            _undestroyed[thread] = destroys
    thread.start()


def _at_exit() -> None:
    gloo_threads.wait_until_still(_MOST.total_seconds())
    wait(_MOST)
    with _lock:
        unfinished = [references for references, when in _undestroyed.values() if not when.is_set()]
    for references in unfinished:
        for reference in references:
            # Never destroyed: the destructor would wait for what the group still does.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(reference))


# Registered on import, so it runs after the exit handlers of those who use it: handlers still start threads.
atexit.register(_at_exit)
