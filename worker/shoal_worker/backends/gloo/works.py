"""Work objects of an interruptible Gloo group. They replace Gloo's own work objects, whose waits
cannot be interrupted (interruptible.py).

Threads: the thread that issued a work calls `wait` and `get_future`; Gloo's threads and `end_works`
complete the work.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch.distributed import Work

from shoal_worker.backends import native_threads
from shoal_worker.backends.base import GroupEndedError
from shoal_worker.backends.gloo import on_devices
from shoal_worker.backends.native_threads import wait_until_asleep
from shoal_worker.backends.waits import Waits

_MOMENT_S: Final = 10.0
"""Maximum time that `end_works` waits for Gloo, in seconds. Operations that Gloo notifies of a
broken connection end within a millisecond, or a few under load. While one of Gloo's threads is
running, it may write to tensors that the repeated step would use. No operation of a step computes
longer than this limit."""

_ONE_PIECE_BYTES: Final = 1024
"""Size of a message, in bytes, that fits into one TCP segment together with Gloo's header on every
network."""

_MOMENT_OF_A_MESSAGE_S: Final = 0.25
"""Maximum time that `end_works` waits for a message, in seconds. Gloo's loop writes the bytes of
the message to the tensor, and does not sleep while the kernel still has some of them.
"""

_MOMENT_AT_EXIT_S: Final = 1.0
"""Maximum time that the interpreter's exit waits for the thread that waits for messages, in
seconds. The thread may never end if it is waiting in the middle of a message.
"""

_WHILE: Final = timedelta(milliseconds=10)
"""Duration of one wait in C++, after which the waiting thread checks whether the group has
ended."""


class Owner(Protocol):
    """Interface that a work requires of the group that has issued it."""

    waits: Waits
    waiter: Waiter
    timeout: timedelta
    """Time limit of a message."""

    def loss(self, name: str, error: RuntimeError) -> str | None:
        """Returns the reason why the group has ended, or None if it has not. Called with each
        failure of a work.
        """
        ...

    def raise_if_lost(self, name: str, error: RuntimeError) -> None:
        """Raises GroupEndedError if `error` has ended the group."""
        ...

    def issued(self, work: InterruptibleWork | Transfer) -> None:
        """Records a work that Gloo has started."""
        ...

    def finished(self, work: InterruptibleWork | Transfer) -> None:
        """Records a work that Gloo has completed. Called once per work."""
        ...


class InterruptibleWork(Work):
    """An issued collective. It ends when Gloo's work ends, or when the group is aborted."""

    def __init__(
        self,
        name: str,
        native: Work,
        group: Owner,
        finish: Callable[[], Any] | None,
        order: on_devices.Order | None = None,
    ) -> None:
        """`finish`: function called once Gloo's work is complete; it returns the value of the
        work's future. `order`: keeps a device's computations before and after the work in order;
        None on the host.
        """
        super().__init__()
        self._name = name
        self._native: Work | None = native
        self._group: Owner | None = group
        self._waits = group.waits
        self._finish = finish
        self._order = order
        self._over = False
        self._over_soon: threading.Event | None = None
        """Event that is set when the work has ended. Created on demand, because creating it takes
        longer than everything else here."""
        self._value: Callable[[], Any] = lambda: None
        self._failure: tuple[type[Exception], str] | None = None
        self._settled: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._followed = False
        self._lock = threading.Lock()
        """Guards all attributes above."""
        self._finishing = threading.Lock()
        """Held while the result is written, so that no result is written after the work has been
        aborted."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the result has arrived. A `timeout` of None or 0 means no limit. Raises
        GroupEndedError if the group has ended, and RuntimeError for other failures or after
        `timeout`."""
        deadline = time.monotonic() + timeout.total_seconds() if timeout else float("inf")
        with self._waits.of(self._name):
            while not self._over:
                self._wait_for_native()
                if not self._over and time.monotonic() >= deadline:
                    raise RuntimeError(f"{self._name} took longer than {timeout}")
        self._raise_failure()
        if self._order is not None:
            self._order.come_after()
        return True

    def is_completed(self) -> bool:
        """Returns whether `wait` would return or raise immediately."""
        return self._over or self.native_completed

    def is_success(self) -> bool:
        """Returns whether `wait` has returned without an error."""
        return self._over and self._failure is None

    def result(self) -> Any:
        """Returns the output tensors, once `wait` has returned."""
        return self._value()

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future of the output tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            settled: torch.futures.Future[None] = torch.futures.Future()
            future = self._future = settled.then(self._outcome)
            over = self._over
            if not over:
                self._settled = settled
        if over:
            settled.set_result(None)
        else:
            self.follow()
        return future

    @property
    def native_completed(self) -> bool:
        """True if Gloo has completed its work."""
        native = self._native
        return native is None or bool(native.is_completed())

    def follow(self) -> None:
        """Makes the work complete as soon as Gloo's work does, even if no thread is waiting."""
        with self._lock:
            native, followed, self._followed = self._native, self._followed, True
        if native is not None and not followed:
            native.get_future().add_done_callback(self._native_done)

    def await_native(self, seconds: float) -> None:
        """Waits, for at most `seconds`, until Gloo's work is complete or none of Gloo's threads is
        running."""
        with self._lock:
            if self._over:
                return
            done = self._over_soon = self._over_soon or threading.Event()
        wait_until_asleep(done, seconds)

    def end(self, reason: str) -> None:
        """Aborts the work, even if Gloo has not completed it."""
        with self._finishing:
            settled = self._settle(lambda: None, (GroupEndedError, reason))
        _complete(settled)

    def _wait_for_native(self) -> None:
        """Waits briefly in C++. This is the fastest way to notice that Gloo has completed the work,
        but it does not notice an abort.
        """
        native = self._native
        if native is None:
            return  # another thread has just settled the work
        try:
            native.wait(_WHILE)
        except RuntimeError:  # "Operation timed out!", or a failure of the work
            if not native.is_completed():
                return
        self._native_is_done(native)

    def _native_done(self, _: torch.futures.Future[Any]) -> None:
        """Handles Gloo's completion. Called by Gloo, in Gloo's thread."""
        native = self._native
        if native is not None:
            self._native_is_done(native)

    def _native_is_done(self, native: Work) -> None:
        """Handles Gloo's completion. Called by the waiting thread, by Gloo's thread, or by both."""
        settled = None
        with self._finishing:
            group, finish = self._group, self._finish
            if group is None:
                return
            if not self._over:
                settled = self._settle(*self._native_outcome(native, group, finish))
            self._native = self._group = self._finish = None
        group.finished(self)
        _complete(settled)

    def _native_outcome(
        self, native: Work, group: Owner, finish: Callable[[], Any] | None
    ) -> tuple[Callable[[], Any], tuple[type[Exception], str] | None]:
        try:
            future = native.get_future()  # complete slightly earlier than the work itself
            future.wait()
            with contextlib.nullcontext() if self._order is None else self._order.finishing():
                if finish is None:
                    return future.value, None
                value = finish()
            return lambda: value, None
        except RuntimeError as error:
            reason = group.loss(self._name, error)
            return lambda: None, (RuntimeError, str(error)) if reason is None else (
                GroupEndedError,
                reason,
            )

    def _settle(
        self, value: Callable[[], Any], failure: tuple[type[Exception], str] | None
    ) -> torch.futures.Future[None] | None:
        """Settles the work; only the first call has an effect. Returns a future that the caller
        must complete, or None. No lock may be held while the future is completed, because that runs
        callbacks of other code.
        """
        with self._lock:
            if self._over:
                return None
            self._value, self._failure = value, failure
            self._over = True
            if self._over_soon is not None:
                self._over_soon.set()
            settled, self._settled = self._settled, None
            return settled

    def _outcome(self, _: torch.futures.Future[None]) -> Any:
        self._raise_failure()
        return self._value()

    def _raise_failure(self) -> None:
        """Raises the stored failure as a new error each time, because the traceback of a stored
        error would keep the caller's variables alive."""
        if self._failure is not None:
            kind, text = self._failure
            raise kind(text)


class Transfer(Work):
    """A point-to-point transfer.

    A short message is sent in one piece, and the caller waits in Gloo. A connection can break in
    the middle of a longer message, and Gloo's wait then lasts until its timeout. For longer
    messages, another thread therefore waits in Gloo, and the caller waits for that thread or for
    the end of the group.
    """

    def __init__(self, name: str, native: Work, group: Owner, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._name = name
        self._native = native
        self._group = group
        self._tensors = tensors
        self._over: threading.Event | None = None
        """Event that is set when the caller may continue; created by `wait`."""
        self._failure: tuple[type[Exception], str] | None = None
        self._lock = threading.Lock()
        """Guards `_failure`, which is written before the event is set."""
        self.native_completed = False
        """True once Gloo has completed the transfer."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the tensor has been sent or received. A `timeout` of None or 0 means the
        group's timeout. Raises GroupEndedError if the group has ended. A timeout also aborts the
        group."""
        limit = timeout or self._group.timeout
        with self._group.waits.of(self._name):
            if sum(tensor.nbytes for tensor in self._tensors) > _ONE_PIECE_BYTES:
                return self._wait_apart(limit)
            try:
                return bool(self._native.wait(limit))
            except RuntimeError as error:
                self._group.raise_if_lost(self._name, error)
                raise

    def is_completed(self) -> bool:
        """Returns whether Gloo has completed the transfer."""
        return bool(self._native.is_completed())

    def source_rank(self) -> int:
        """Returns the rank that sent the message received by `recv_anysource`."""
        return int(self._native._source_rank())

    _source_rank = source_rank

    def follow(self) -> None:
        """Does nothing, because a thread already waits in Gloo for the transfer."""

    def await_native(self, seconds: float) -> None:
        """Waits, for at most `seconds`, until Gloo has completed the transfer. Until then, Gloo may
        still write data that has arrived on the connection to the tensor.
        """
        if self._over is not None:
            self._over.wait(min(seconds, _MOMENT_OF_A_MESSAGE_S))

    def end(self, reason: str) -> None:
        """Ends the caller's wait, even if Gloo has not completed the transfer."""
        self._settle((GroupEndedError, reason))

    def _wait_apart(self, limit: timedelta) -> bool:
        if self._over is None:
            self._over = threading.Event()
            # from now on, the end of the group sets the event; if the group has already ended, the
            # event is set now
            self._group.issued(self)
            if self._over.is_set() or not self._group.waiter.wait_for(
                lambda: self._wait_in_gloo(limit)
            ):
                self.native_completed = True  # no thread is waiting for this transfer in Gloo
                self._settle((GroupEndedError, "the process group was shut down"))
                self._group.finished(self)
        self._over.wait()
        if self._failure is not None:
            kind, text = self._failure
            raise kind(text)
        return True

    def _wait_in_gloo(self, limit: timedelta) -> None:
        failure: tuple[type[Exception], str] | None = (
            RuntimeError,
            f"{self._name}: the thread waiting for it failed",
        )
        try:
            self._native.wait(limit)
            failure = None
        except Exception as error:
            failure = (RuntimeError, str(error))
            reason = (
                self._group.loss(self._name, error) if isinstance(error, RuntimeError) else None
            )
            if reason is not None:
                failure = (GroupEndedError, reason)
        finally:  # this is the only event that the caller waits for
            self.native_completed = True
            self._settle(failure)
            self._group.finished(self)

    def _settle(self, failure: tuple[type[Exception], str] | None) -> None:
        """Settles the transfer; only the first call has an effect."""
        over = self._over
        assert over is not None, "no thread waits for this transfer"
        with self._lock:
            if not over.is_set():
                self._failure = failure
                over.set()


class Waiter:
    """Thread of a group that waits in Gloo for one message after another. It starts with the first
    message and stops when `close` is called.

    Only the thread that issues transfers may use a waiter: two concurrent waits would receive each
    other's messages.
    """

    def __init__(self) -> None:
        self._waits: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._begun = self._closed = False
        self._lock = threading.Lock()

    def wait_for(self, wait: Callable[[], None]) -> bool:
        """Queues `wait`, which must not raise, to be called after earlier waits have returned.
        Returns False if the waiter has been closed and will not call `wait`."""
        with self._lock:
            if self._closed:
                return False
            if not self._begun:
                native_threads.start(
                    partial(_wait_in_turn, self._waits),
                    name="shoal-gloo-transfers",
                    most_s=_MOMENT_AT_EXIT_S,
                )
                self._begun = True
            self._waits.put(wait)
            return True

    def close(self) -> None:
        """Closes the waiter, which then accepts no further messages. Idempotent."""
        with self._lock:
            self._closed = True
            self._waits.put(None)


def _wait_in_turn(waits: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (wait := waits.get()) is not None:
        wait()
        del wait  # the reference would keep a tensor in memory


def _complete(settled: torch.futures.Future[None] | None) -> None:
    if settled is not None:
        settled.set_result(None)


def end_works(
    works: Sequence[InterruptibleWork | Transfer], reason: str, drain: Callable[[], None]
) -> None:
    """Aborts the works of a group. First waits for a short time until Gloo has completed them or
    its threads are asleep.

    `drain`: function that discards the remaining data of the broken connections, so that Gloo's
    loop has no more data to write to tensors.
    """
    deadline = time.monotonic() + _MOMENT_S
    for work in works:
        work.follow()
    for work in works:
        work.await_native(deadline - time.monotonic())
    drain()
    for work in works:
        work.end(reason)


# ----------------------------------------------------------------------------- several works as one
#
# One work for a collective that consists of others, such as an all-gather made of broadcasts.
#
# The group follows, aborts and counts each part as if it had been issued alone. The threading rules
# of the parts apply to it as well.


class AllOf(Work):
    """Work that is complete when all `parts` are complete. `value`: result of the work's future."""

    def __init__(self, parts: Sequence[Work], value: Any) -> None:
        super().__init__()
        self._parts = parts
        self._value = value
        self._failed = False
        """True once `wait` has raised an error. Parts after the failed one may end later."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the result has arrived. Raises the error of the first part that fails.
        A `timeout` of None or 0 means no limit."""
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        self._failed = True
        for part in self._parts:
            if deadline is None:
                part.wait()
            else:
                part.wait(
                    max(timedelta(milliseconds=1), timedelta(seconds=deadline - time.monotonic()))
                )
        self._failed = False
        return True

    def is_completed(self) -> bool:
        """Returns whether `wait` would return or raise immediately."""
        return self._failed or all(part.is_completed() for part in self._parts)

    def is_success(self) -> bool:
        """Returns whether `wait` has returned without an error."""
        return all(part.is_success() for part in self._parts)

    def result(self) -> Any:
        """Returns the output tensors, once `wait` has returned."""
        return self._value

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future of the output tensors."""
        return torch.futures.collect_all([part.get_future() for part in self._parts]).then(
            self._outcome
        )

    def _outcome(self, done: torch.futures.Future[Any]) -> Any:
        for part in done.value():
            part.value()  # raises the part's error if it has failed
        return self._value
