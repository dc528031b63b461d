"""Ranks of one `launch` take turns: one thread runs until it waits for others, then the next one
does.

Why: torch and Python keep much in globals that processes have to themselves, above all the random
generators; with turns each rank has its own, nothing that is cached per process is touched by two
ranks at once, and a run is the same every time. And when every rank waits, that is known at once.
What is given up is speed: ranks do not compute side by side.

A turn passes in waits of in-memory groups, and while an errand is run (`run_aside`). A rank that
waits for another one in any other way (a threading.Event, a sleep until a file is there) keeps its
turn: then those who wait for it say so at their deadline.

Threads: everything is guarded by `LOCK`, the one lock of all in-memory ranks of the process.
"""

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
"""Reentrant, because a group may be let go of by the garbage collector anywhere."""
_CHANGED: Final = threading.Condition(LOCK)
_current = threading.local()


class Waitable(Protocol):
    """An object for which ranks wait: a room."""

    @property
    def has_outsiders(self) -> bool:
        """True if threads without turns have a part in it."""
        ...

    def end_for(self, reason: str) -> None:
        """Makes all that wait on it ready, with an error: a rank failed."""
        ...

    def end_deadlocked(self, text: str) -> None:
        """Makes all that wait on it ready, with an error."""
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
        """All rooms that its ranks have entered."""
        self.over: str | None = None
        """Reason why the launch is over; None: it is not."""
        self._size = size
        self._first_states = _random_states()
        self._running: int | None = None
        self._free_for_all = False
        """A rank kept its turn for too long: from then on nobody waits for turns."""
        self._parked: dict[int, _Parked] = {}
        self._mine = [threading.Condition(LOCK) for _ in range(size)]
        self._started: set[int] = set()

    def begin(self, rank: int) -> None:
        """The calling thread is `rank`; returns when it has its first turn. Rank 0 has it once all
        have begun."""
        _current.turns, _current.rank = self, rank
        with LOCK:
            self._started.add(rank)
            self._parked[rank] = _Parked(on=None, ready=lambda: True, what="to begin")
            if len(self._started) == self._size:
                self._pass_on(self._size - 1)
            self._await_turn(rank, None)
            _set_random_states(self._first_states)

    def finish(self, rank: int) -> None:
        """The calling thread's last turn is over."""
        _current.turns = None
        with LOCK:
            if self._running == rank:
                self._pass_on(rank)

    def end_all(self, reason: str) -> None:
        """All groups of its ranks are over, those to come as well. From any thread."""
        with LOCK:
            self.over = self.over or reason
            for room in list(self.rooms):
                room.end_for(reason)

    @contextlib.contextmanager
    def generators_kept(self) -> Iterator[None]:
        """Puts the random generators back to where they stood when this was made."""
        try:
            yield
        finally:
            _set_random_states(self._first_states)

    @property
    def running(self) -> int | None:
        """The rank whose turn it is."""
        return self._running

    def wait(
        self, rank: int, on: Waitable, ready: Callable[[], bool], timeout: float, what: str
    ) -> bool:
        """Until `ready()`, while the others have their turns; False: not within `timeout`
        seconds."""
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
        """Something has changed outside of the turns: whoever waited for that goes on."""
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
        """To the next rank after `rank` that can go on; to none if nobody waits, or all wait for
        outsiders."""
        self._running = self._next(rank)
        self._wake()
        rooms = [parked.on for parked in self._parked.values() if parked.on is not None]
        if self._running is None and rooms and not any(room.has_outsiders for room in rooms):
            waiting = "; ".join(
                f"rank {one} waits {parked.what}" for one, parked in sorted(self._parked.items())
            )
            text = f"no rank can go on: {waiting}{self._ended()}"
            for room in rooms:
                room.end_deadlocked(text)  # and so calls `look`

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
    """The turns that the calling thread takes part in."""
    turns: Turns | None = getattr(_current, "turns", None)
    return turns


def wait(on: Waitable, ready: Callable[[], bool], timeout: float, what: str) -> bool:
    """Until `ready()`; False: not within `timeout` seconds. `what` completes "rank 0 waits ..."."""
    turns = own_turns()
    if turns is not None:
        return turns.wait(_current.rank, on, ready, timeout, what)
    with LOCK:
        return _CHANGED.wait_for(ready, timeout)


class _Errand:
    """Something that a rank has done for it in another thread, which takes no turns."""

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
    """Returns `work()`, which waits for other ranks by other means than a group; they have their
    turns meanwhile.

    `work` has a deadline of its own, and touches nothing that two ranks might touch at once. `what`
    completes "rank 0 waits ...".

    Raises:
        GroupEndedError: another rank has failed; `work` is left to itself.
    """
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
    """To be called with the lock held when something may have become ready for threads without
    turns, or by one of them."""
    _CHANGED.notify_all()
    if turns is not None:
        turns.look()


def _random_states() -> tuple[Any, ...]:
    """Returns the states of the random generators that ranks, as processes, would have each for
    themselves."""
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
