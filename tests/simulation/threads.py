"""Replacements of `threading` and of executors in modules whose threads are simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tests.simulation.scheduler import Actor, current_actor, own_scheduler


class SimulatedCondition:
    """A condition variable without a lock, since only one thread runs at a time. The scheduler
    checks all waits at every turn, so notifying wakes nobody."""

    def __init__(self) -> None:
        self._notified = 0

    def __enter__(self) -> SimulatedCondition:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        """Lets all waiting threads continue."""
        self._notified += 1

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until `notify_all` is called. Returns False after `timeout`."""
        before = self._notified
        return own_scheduler().wait(lambda: self._notified != before, timeout, "for a notification")

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Blocks until `predicate()` is true. Returns False after `timeout`."""
        return own_scheduler().wait(predicate, timeout, "for a condition")


class SimulatedThread:
    """An additional thread of the simulated process that starts it."""

    def __init__(
        self,
        *,
        target: Callable[..., Any],
        args: Sequence[Any] = (),
        name: str = "thread",
        daemon: bool = False,
    ) -> None:
        self.name, self.daemon = name, daemon
        self._target, self._arguments = target, args
        self._actor: Actor | None = None

    def start(self) -> None:
        """Starts the thread. It gets its first turn later."""
        starter = current_actor()
        assert starter is not None
        self._actor = starter.scheduler.spawn(
            starter.host, self.name, lambda: self._target(*self._arguments)
        )

    def is_alive(self) -> bool:
        """Returns whether the thread was started and has not ended."""
        return self._actor is not None and not self._actor.done

    def join(self, timeout: float | None = None) -> None:
        """Blocks until the thread has ended."""
        own_scheduler().wait(lambda: not self.is_alive(), timeout, f"for {self.name} to end")


class SimulatedEvent:
    """An event that is never cleared."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        """Lets all waiting threads continue."""
        self._set = True

    def is_set(self) -> bool:
        """Returns whether the event is set."""
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until the event is set. Returns False after `timeout`."""
        return own_scheduler().wait(self.is_set, timeout, "for an event")


class SimulatedThreading:
    """The part of `threading` that the link, the stall watch and the checkpoint writer use."""

    Condition = SimulatedCondition
    Event = SimulatedEvent
    Thread = SimulatedThread

    class Lock:
        """A lock without effect, because it is never contended."""

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass


class InlineExecutor:
    """An executor that runs submitted work immediately."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Runs `work` and returns its completed future."""
        future: Future[Any] = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, *, wait: bool = True) -> None:
        """Does nothing: all work is done."""
