"""Virtual time and turns: one thread of the simulated processes runs at a time, and a seed decides
which is next.

A thread runs until it waits for a condition or a time. The seed then chooses one of the threads
that can continue. If none can, time advances to the next timer or deadline. So a run depends on its
seed alone, takes no real waiting, and detects at once a wait that nothing will end.

Threads: an `Actor` runs only while it has the turn, so neither this module nor the simulated code
needs locks. Callbacks of timers run on the thread that is about to wait, and must not wait
themselves.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

_current = threading.local()

LONGEST_REAL_S: Final = 60.0
"""Longest real time of one turn in seconds. A longer turn means that a thread waits without the
scheduler, and the run is given up."""


class Killed(BaseException):
    """Raised in the threads of a dead process to end them."""


class Host(Protocol):
    """The part of a simulated process that its threads use."""

    name: str
    dead: bool
    """True once the process is dead. Its threads end at their next wait."""
    stopped_until: float
    """Virtual time until which none of its threads runs."""

    def comes_to(self, what: str) -> None:
        """Called by the main thread before it waits or at a failpoint."""
        ...


class Actor:
    """One thread of a simulated process."""

    def __init__(self, scheduler: Scheduler, host: Host, name: str, *, main: bool) -> None:
        self.scheduler, self.host, self.name, self.main = scheduler, host, name, main
        self.gate = threading.Lock()
        self.gate.acquire()
        self.ready: Callable[[], bool] = _always
        self.deadline: float | None = None
        self.waits_for = "its first turn"
        self.done = False

    def can_go_on(self, now: float) -> bool:
        """Returns whether the thread can continue at time `now`."""
        if self.host.dead:
            return True
        return now >= self.host.stopped_until and (
            (self.deadline is not None and now >= self.deadline) or self.ready()
        )

    @property
    def due(self) -> float | None:
        """Latest virtual time at which the thread continues; None: no deadline."""
        return None if self.deadline is None else max(self.deadline, self.host.stopped_until)


class Scheduler:
    """Owns the clock, the timers and the turn of threads."""

    def __init__(self, seed: int, *, most_turns: int = 200_000) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        """Virtual time in seconds."""
        self.turns = 0
        self.over: str | None = None
        """Reason why the run has ended; None while it continues."""
        self.stuck: list[str] = []
        """Waits of all threads when the run ended."""
        self._most_turns = most_turns
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._waiting: list[Actor] = []
        self._end = threading.Lock()
        self._end.acquire()
        self._unwinding = False

    # ----------------------------------------------------------------------------------- for actors

    def wait(self, ready: Callable[[], bool], timeout: float | None, what: str) -> bool:
        """Blocks until `ready()` while others take turns. Returns False after `timeout` virtual
        seconds."""
        actor = current_actor()
        assert actor is not None
        self._check(actor)
        if actor.main:
            actor.host.comes_to(what)
            self._check(actor)
        if ready():
            return True
        actor.ready, actor.waits_for = ready, what
        actor.deadline = None if timeout is None else self.now + timeout
        self._pass_turn(actor)
        self._check(actor)
        return ready()

    def sleep(self, seconds: float) -> None:
        """Blocks for `seconds` of virtual time."""
        self.wait(_never, seconds, f"for {seconds:g} s")

    def pause(self, seconds: float) -> None:
        """Blocks for `seconds` of virtual time as if the script were computing; this is not a point
        of the process."""
        actor = current_actor()
        assert actor is not None
        main, actor.main = actor.main, False
        try:
            self.sleep(seconds)
        finally:
            actor.main = main

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Calls `callback` after `seconds` of virtual time, on any thread."""
        heapq.heappush(self._timers, (self.now + seconds, next(self._numbers), callback))

    def spawn(self, host: Host, name: str, run: Callable[[], Any], *, main: bool = False) -> Actor:
        """Starts a thread of `host`, which gets its first turn later."""
        actor = Actor(self, host, name, main=main)
        self._waiting.append(actor)
        threading.Thread(
            target=self._be, args=(actor, run), name=f"simulated {host.name} {name}", daemon=True
        ).start()
        return actor

    # ------------------------------------------------------------------------------ for who runs it

    def run(self) -> None:
        """Runs until `finish` is called or nothing more can happen, and then unwinds all
        threads."""
        self._choose(None)
        if not self._end.acquire(timeout=20 * LONGEST_REAL_S):
            raise RuntimeError(
                "a simulated thread waits for something that the scheduler does not know"
            )
        self._unwinding = True
        while self._waiting:
            actor = self._waiting.pop(0)
            actor.gate.release()
            if not self._end.acquire(timeout=LONGEST_REAL_S):
                raise RuntimeError(f"thread {actor.name!r} of {actor.host.name!r} does not end")

    def finish(self, why: str) -> None:
        """Ends the run: no thread gets another turn."""
        if self.over is None:
            self.over = why
            self.stuck = [
                f"{actor.host.name} ({actor.name}) waits {actor.waits_for}"
                for actor in self._waiting
                if not actor.host.dead
            ]

    # --------------------------------------------------------------------------------------- inside

    def _check(self, actor: Actor) -> None:
        if actor.host.dead or self._unwinding:
            raise Killed

    def _be(self, actor: Actor, run: Callable[[], Any]) -> None:
        actor.gate.acquire()
        _current.actor = actor
        try:
            self._check(actor)
            run()
        except Killed:
            pass
        finally:
            actor.done = True
            _current.actor = None
            self._choose(actor)

    def _pass_turn(self, actor: Actor) -> None:
        self._waiting.append(actor)
        if self._choose(actor):
            actor.gate.acquire()

    def _choose(self, leaving: Actor | None) -> bool:
        """Gives the turn to a thread that can continue. Returns False if `leaving` itself
        continues."""
        if self._unwinding:
            self._end.release()
            return True
        while self.over is None:
            able = [actor for actor in self._waiting if actor.can_go_on(self.now)]
            if able:
                chosen = able[0] if len(able) == 1 else self.random.choice(able)
                self._waiting.remove(chosen)
                self.turns += 1
                if self.turns > self._most_turns:
                    self.finish(f"no end after {self.turns} turns")
                if chosen is leaving:
                    return False
                chosen.gate.release()
                return True
            self._let_time_pass()
        self._end.release()
        return True

    def _let_time_pass(self) -> None:
        due = min((actor.due for actor in self._waiting if actor.due is not None), default=None)
        if self._timers and (due is None or self._timers[0][0] <= due):
            at, _, callback = heapq.heappop(self._timers)
            self.now = max(self.now, at)
            try:
                callback()
            except Exception as error:
                # otherwise the waiting thread would end and no thread would have the turn
                self.finish(f"{type(error).__name__} in a timer: {error}")
        elif due is not None:
            self.now = due
        else:
            self.finish("no thread can continue")


def current_actor() -> Actor | None:
    """Returns the calling thread's actor; None outside simulated processes."""
    actor: Actor | None = getattr(_current, "actor", None)
    return actor


def own_scheduler() -> Scheduler:
    """Returns the scheduler of the calling thread, which must belong to a simulated process."""
    actor = current_actor()
    assert actor is not None, "this is no thread of a simulated process"
    return actor.scheduler


def _always() -> bool:
    return True


def _never() -> bool:
    return False
