"""Threads of this process that run inside torch and must end before the interpreter shuts down.

While the interpreter shuts down, it terminates every thread that enters Python from C++. torch's
C++ stack frames cannot be unwound in this way: the process dies from SIGABRT (std::terminate),
whatever its exit status would have been. The interpreter's exit therefore waits for the threads
started here. It also waits until none of Gloo's threads is running, because such a thread may call
a callback of a script or of this package.
"""

from __future__ import annotations

import atexit
import ctypes
import queue
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Final

# ----------------------------------------------------------------------------------- Gloo's threads
#
# Determines whether the threads that torch runs Gloo's collectives on are running or asleep.
#
# The kernel reports the state, and torch gives these threads a name. Used once a group's
# connections are broken, to distinguish operations that are about to end from operations that sleep
# until their timeout. Groups cannot be distinguished, so the threads of all groups must be asleep.

_NAME: Final = "pt_gloo_runloop"
_TASKS: Final = Path("/proc/self/task")
_APART_S: Final = 0.003
_FAR_APART_S: Final = 0.1
"""Maximum time, in seconds, that a newly woken thread needs to get a core, even on a busy
machine."""

_Sample = dict[str, str]
"""Number of times that each thread has been scheduled, by thread id."""


def wait_until_asleep(done: threading.Event, at_most_s: float) -> None:
    """Blocks until `done` is set, or until none of Gloo's threads has run in the last 3 ms. Waits
    for at most `at_most_s` seconds."""
    deadline = time.monotonic() + at_most_s
    before: _Sample | None = None
    while not done.wait(_APART_S) and time.monotonic() < deadline:
        now = _sample()
        if now and now == before:
            return
        before = now


def wait_until_still(at_most_s: float) -> None:
    """Blocks until Gloo has no threads, or until none of its threads has run in the last 0.1 s.
    Waits for at most `at_most_s` seconds."""
    deadline = time.monotonic() + at_most_s
    now, before = _sample(), None
    while now != {} and (now is None or now != before) and time.monotonic() < deadline:
        time.sleep(_FAR_APART_S)
        now, before = _sample(), now


def _sample() -> _Sample | None:
    """Returns how many times each of Gloo's threads has been scheduled. Returns None if one of
    these threads is running, and an empty sample if Gloo has no thread."""
    sample: _Sample = {}
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        try:
            fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        except OSError:
            continue  # the thread has ended since it was listed
        if fields["Name"].strip() == _NAME:
            if not fields["State"].strip().startswith("S"):
                return None
            sample[task.name] = (
                fields["voluntary_ctxt_switches"] + fields["nonvoluntary_ctxt_switches"]
            )
    return sample


# ----------------------------------------------------------- threads that the interpreter waits for

_MOST: Final = timedelta(seconds=5)

_lock = threading.Lock()
_running: set[_Call] = set()
"""Calls that have started and not ended. Guarded by `_lock`."""


class _Call:
    """Function to be called on one of this module's threads."""

    def __init__(
        self,
        call: Callable[[], object],
        most_s: float,
        *,
        destroys: tuple[list[object], threading.Event] | None = None,
    ) -> None:
        """`most_s`: maximum time that the interpreter's exit waits for the call, in seconds.
        `destroys`: objects that the call releases, and the event after which it releases them.
        """
        self._call = call
        self.most_s = most_s
        self.destroys = destroys
        self.over = threading.Event()

    def __call__(self) -> None:
        try:
            self._call()
        finally:
            with _lock:
                _running.discard(self)
            self.over.set()


def start(call: Callable[[], object], *, name: str, most_s: float = _MOST.total_seconds()) -> None:
    """Runs `call`, which may block inside torch, on a thread called `name`. The interpreter's exit
    waits at most `most_s` seconds for the call."""
    one = _Call(call, most_s)
    if not _start(one, name):
        _reserve.put(one)


def drop(references: list[object], *, when: threading.Event) -> None:
    """Clears the list `references`, which must hold the last references to its objects, on a new
    thread once `when` is set. Returns immediately.

    Used for process groups. Their destructors join threads, which takes about 10 ms, or wait for
    unfinished work.
    """

    def destroy() -> None:
        when.wait()
        references.clear()

    if not _start(
        _Call(destroy, _MOST.total_seconds(), destroys=(references, when)), "shoal-group-end"
    ):
        for reference in references:
            # their connections are closed, and the process is about to exit
            keep(reference)


def keep(reference: object) -> None:
    """Keeps an object alive until the process exits, because its destructor would wait for
    unfinished work or terminate the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(reference))


def wait(timeout: timedelta) -> bool:
    """Waits for all running calls, but not for the destruction of unfinished groups. Returns False
    if some are still running after `timeout`."""
    started = time.monotonic()
    with _lock:
        running = [call for call in _running if call.destroys is None or call.destroys[1].is_set()]
    ended = [
        call.over.wait(
            max(0.0, started + min(call.most_s, timeout.total_seconds()) - time.monotonic())
        )
        for call in running
    ]
    return all(ended)


def _start(call: _Call, name: str) -> bool:
    """Starts a thread for `call`. Returns False if no thread can be started. Even then, a call that
    does not destroy objects counts as running, because a reserve thread runs it."""
    # Daemons: a call that never ends must not keep the process alive.
    thread = threading.Thread(target=call, name=name, daemon=True)
    with _lock:  # a call that ends immediately must wait for this lock
        try:
            thread.start()
        except RuntimeError:
            if not STARTS_NONE_AT_EXIT:
                raise
            if call.destroys is None:
                _running.add(call)
            return False
        _running.add(call)
    return True


# Python 3.12.0 to 3.12.2 cannot start threads once the interpreter shuts down (gh-113964), which is
# when the groups of a script without shoal.shutdown() end. For these versions, four threads are
# started in advance: one waits for torch while a group is finalized, another enforces the time
# limit, and the group may have parts.

STARTS_NONE_AT_EXIT: Final = (3, 12, 0) <= sys.version_info[:3] <= (3, 12, 2)
_reserve: Final[queue.SimpleQueue[_Call]] = queue.SimpleQueue()


def _be_reserve() -> None:
    while True:
        _reserve.get()()


if STARTS_NONE_AT_EXIT:
    for _number in range(4):
        threading.Thread(target=_be_reserve, name=f"shoal-reserve-{_number}", daemon=True).start()


_before_waiting: Final[list[Callable[[], None]]] = []


def before_exit(call: Callable[[], None]) -> None:
    """Registers a function that stops threads at the interpreter's exit. The function runs after
    the exit handlers of this module's users, no matter when it is registered: a session that leaves
    its job at exit still needs its group."""
    _before_waiting.append(call)


def _at_exit() -> None:
    for call in _before_waiting:
        call()
    wait_until_still(_MOST.total_seconds())
    wait(_MOST)
    with _lock:
        unfinished = [
            call.destroys[0]
            for call in _running
            if call.destroys is not None and not call.destroys[1].is_set()
        ]
    for references in unfinished:
        for reference in references:
            keep(reference)


# Registered on import, so it runs after the exit handlers of this module's users, which still start
# threads.
atexit.register(_at_exit)
