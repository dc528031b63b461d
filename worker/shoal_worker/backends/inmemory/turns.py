"""Turns of the ranks of one `launch`: one thread runs until it waits for other ranks, then the next
thread runs.

torch and Python keep much state in globals that separate processes would not share, above all the
random generators. With turns, each rank has its own generators, no two ranks use a process-wide
cache at the same time, and every run is the same. If all ranks wait, the deadlock is detected
immediately. The price is speed: ranks do not compute in parallel.

A rank passes on its turn while it waits in an in-memory group, and while another thread works for
it (`run_aside`). A rank that waits for another rank in any other way (a threading.Event, sleeping
until a file exists) keeps its turn. Ranks that wait for such a rank name it in the error that they
raise when they time out.

Threads: all state is guarded by `LOCK`, the single lock of all in-memory ranks of the process."""

from __future__ import annotations

import contextlib
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import torch

from shoal_worker.backends.base import GroupEndedError

T = TypeVar("T")

LOCK: Final = threading.RLock()
"""Lock of all turns and rooms. Reentrant, because the garbage collector may delete a group at any
time."""
_CHANGED: Final = threading.Condition(LOCK)
_current = threading.local()


class Waitable(Protocol):
    """Object that ranks wait on, such as a room."""

    @property
    def has_outsiders(self) -> bool:
        """True if threads that do not take turns can end a wait on the object."""
        ...

    def end_for(self, reason: str) -> None:
        """Ends all waits on the object with an error because a rank has failed."""
        ...

    def end_deadlocked(self, text: str) -> None:
        """Ends all waits on the object with an error because all ranks are waiting for each
        other."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Parked:
    on: Waitable | None
    ready: Callable[[], bool]
    what: str


class Turns:
    """Passes the turn among the ranks 0 to `size` - 1."""

    def __init__(self, size: int) -> None:
        self.rooms: weakref.WeakSet[Waitable] = weakref.WeakSet()
        """All rooms that the ranks have entered."""
        self.over: str | None = None
        """Reason why the launch has ended; None while it runs."""
        self._size = size
        self._first_states = _random_states()
        self._running: int | None = None
        self._free_for_all = False
        """True once a rank has kept its turn for too long. Ranks then no longer wait for their
        turns."""
        self._parked: dict[int, _Parked] = {}
        self._mine = [threading.Condition(LOCK) for _ in range(size)]
        self._started: set[int] = set()

    def begin(self, rank: int) -> None:
        """Registers the calling thread as `rank` and blocks until its first turn. Rank 0 gets the
        first turn once all ranks have begun."""
        _current.turns, _current.rank = self, rank
        with LOCK:
            self._started.add(rank)
            self._parked[rank] = _Parked(on=None, ready=lambda: True, what="to begin")
            if len(self._started) == self._size:
                self._pass_on(self._size - 1)
            self._await_turn(rank, None)
            _set_random_states(self._first_states)

    def finish(self, rank: int) -> None:
        """Ends the calling thread's last turn and passes the turn on."""
        _current.turns = None
        with LOCK:
            if self._running == rank:
                self._pass_on(rank)

    def end_all(self, reason: str) -> None:
        """Aborts all groups of the ranks, including groups created later. Callable from any
        thread."""
        with LOCK:
            self.over = self.over or reason
            for room in list(self.rooms):
                room.end_for(reason)

    @contextlib.contextmanager
    def generators_kept(self) -> Iterator[None]:
        """Context that restores the random generators, on exit, to their states at the start of the
        launch."""
        try:
            yield
        finally:
            _set_random_states(self._first_states)

    @property
    def running(self) -> int | None:
        """The rank that has the turn."""
        return self._running

    def wait(
        self, rank: int, on: Waitable, ready: Callable[[], bool], timeout: float, what: str
    ) -> bool:
        """Blocks until `ready()` returns True, while other ranks take turns. Returns False after
        `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with LOCK:
            if ready() or self._free_for_all:
                return _CHANGED.wait_for(ready, timeout)
            states = _random_states()
            self._parked[rank] = _Parked(on=on, ready=ready, what=what)
            self._pass_on(rank)
            if self._running != rank:
                if not self._await_turn(rank, timeout):
                    self._free_for_all = True
                    for condition in self._mine:
                        condition.notify()
                _set_random_states(states)
            return _CHANGED.wait_for(ready, max(0.0, deadline - time.monotonic()))

    def look(self) -> None:
        """Gives the turn to a rank that can continue, if no rank has the turn. Called after a
        change made by a thread that does not take turns."""
        if self._running is None and len(self._started) == self._size:
            self._running = self._next(self._size - 1)
            self._wake()

    def _await_turn(self, rank: int, timeout: float | None) -> bool:
        came = self._mine[rank].wait_for(
            lambda: self._running == rank or self._free_for_all, timeout
        )
        self._parked.pop(rank, None)
        return came

    def _pass_on(self, rank: int) -> None:
        """Passes the turn to the next rank after `rank` that can continue. No rank gets the turn if
        none is waiting, or if all are waiting for threads that do not take turns."""
        self._running = self._next(rank)
        self._wake()
        rooms = [parked.on for parked in self._parked.values() if parked.on is not None]
        if self._running is None and rooms and not any(room.has_outsiders for room in rooms):
            waiting = "; ".join(
                f"rank {one} is waiting {parked.what}"
                for one, parked in sorted(self._parked.items())
            )
            text = f"deadlock, all running ranks are waiting: {waiting}{self._ended()}"
            for room in rooms:
                room.end_deadlocked(text)  # this also calls `look`

    def _wake(self) -> None:
        if self._running is not None:
            self._parked.pop(self._running)
            self._mine[self._running].notify()

    def _next(self, rank: int) -> int | None:
        after = ((rank + step) % self._size for step in range(1, self._size + 1))
        return next(
            (one for one in after if one in self._parked and self._parked[one].ready()), None
        )

    def _ended(self) -> str:
        ended = [rank for rank in range(self._size) if rank not in self._parked]
        return f"; ranks {ended} have ended" if ended else ""


def own_turns() -> Turns | None:
    """Returns the `Turns` that the calling thread takes part in; None if there are none."""
    turns: Turns | None = getattr(_current, "turns", None)
    return turns


def wait(on: Waitable, ready: Callable[[], bool], timeout: float, what: str) -> bool:
    """Blocks until `ready()` returns True. Returns False after `timeout` seconds.

    `what`: description of the wait; completes "rank 0 waits ...".
    """
    turns = own_turns()
    if turns is not None:
        return turns.wait(_current.rank, on, ready, timeout, what)
    with LOCK:
        return _CHANGED.wait_for(ready, timeout)


class _Errand:
    """Work done on behalf of a rank by another thread, which does not take turns."""

    has_outsiders = True

    def __init__(self, turns: Turns) -> None:
        self.future: Future[Any] = Future()
        self.ended: str | None = None
        self._turns = turns

    def run(self, work: Callable[[], Any]) -> None:
        try:
            self.future.set_result(work())
        except BaseException as error:
            self.future.set_exception(error)
        with LOCK:
            changed(self._turns)

    def end_for(self, reason: str) -> None:
        """Implements `Waitable.end_for`."""
        self.ended = self.ended or reason
        changed(self._turns)

    end_deadlocked = end_for


def run_aside(work: Callable[[], T], what: str) -> T:
    """Runs `work` on another thread while the other ranks take turns, and returns the result of
    `work`. Used when ranks wait for each other by means other than a group's collectives.

    `work`: function with its own deadline. It must not access anything that another rank may access
    at the same time. `what`: description of the wait; completes "rank 0 waits ...".

    Raises:
        GroupEndedError: another rank has failed. `work` continues unattended."""
    turns = own_turns()
    if turns is None:
        return work()
    errand = _Errand(turns)
    with LOCK:
        turns.rooms.add(errand)
        if turns.over is not None:
            raise GroupEndedError(turns.over)
    threading.Thread(
        target=errand.run, args=(work,), name=f"shoal-rank-{_current.rank}-aside", daemon=True
    ).start()
    wait(
        errand,
        lambda: errand.future.done() or errand.ended is not None,
        threading.TIMEOUT_MAX,
        what,
    )
    if errand.ended is not None and not errand.future.done():
        raise GroupEndedError(errand.ended)
    result: T = errand.future.result()
    return result


def changed(turns: Turns | None) -> None:
    """Notifies all waiting threads, with or without turns, that a condition may have changed. The
    caller must hold the lock."""
    _CHANGED.notify_all()
    if turns is not None:
        turns.look()


def _random_states() -> tuple[Any, ...]:
    """Returns the states of the process-wide random generators."""
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return (
        torch.default_generator.get_state(),
        [generator.get_state() for generator in devices],
        random.getstate(),
        np.random.get_state(),
    )


def _set_random_states(states: tuple[Any, ...]) -> None:
    default, devices, pythons, numpys = states
    torch.default_generator.set_state(default)
    for generator, state in zip(torch.cuda.default_generators, devices, strict=False):
        generator.set_state(state)
    random.setstate(pythons)
    np.random.set_state(numpys)
