"""What stands in the place of `threading` and of executors in modules whose threads are simulated
ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tests.simulation.scheduler import Actor, current_actor, own_scheduler


class SimulatedCondition:
    """Needs no lock, since only one thread runs. Notifying is not needed either: who waits is
    looked after at every turn."""

    def __init__(self) -> None:
        self._notified = 0

    def __enter__(self) -> SimulatedCondition:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        """All that wait may go on."""
        self._notified += 1

    def wait(self, timeout: float | None = None) -> bool:
        """Until somebody notifies."""
        before = self._notified
        return own_scheduler().wait(
            lambda: self._notified != before, timeout, "to be told of something"
        )

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Until `predicate()`."""
        return own_scheduler().wait(predicate, timeout, "for something to become so")


class SimulatedThread:
    """A further thread of the simulated process that starts it."""

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
        """It has its first turn later."""
        starter = current_actor()
        assert starter is not None
        self._actor = starter.scheduler.spawn(
            starter.host, self.name, lambda: self._target(*self._arguments)
        )

    def is_alive(self) -> bool:
        """It has not ended."""
        return self._actor is not None and not self._actor.done

    def join(self, timeout: float | None = None) -> None:
        """Until it has ended."""
        own_scheduler().wait(lambda: not self.is_alive(), timeout, f"for {self.name} to end")


class SimulatedEvent:
    """Set once."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        """All that wait may go on."""
        self._set = True

    def is_set(self) -> bool:
        """It was set."""
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        """Until it is set."""
        return own_scheduler().wait(self.is_set, timeout, "for an event")


class SimulatedThreading:
    """Of the module `threading`, what the link, the stall watch and the writer of checkpoints
    use."""

    Condition = SimulatedCondition
    Event = SimulatedEvent
    Thread = SimulatedThread

    class Lock:
        """Never contended."""

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass


class InlineExecutor:
    """Does at once what it is given."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Returns what is done already."""
        future: Future[Any] = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, *, wait: bool = True) -> None:
        """Nothing is left to do."""
