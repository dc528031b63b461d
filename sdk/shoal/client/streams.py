"""Iterators over a job's events and over the lines of its log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

from shoal_common.backoff import Backoff
from shoal_common.clients.calls import ResponseStream
from shoal_common.errors import DeadlineError, UnavailableError

from shoal.client.event import Event
from shoal.client.messages import event_of

_LOOK_INTERVAL_S: Final = 0.1
_LONGEST_BACKOFF_S: Final = 2.0


class Deadline:
    """Deadline of a call, which may be infinite."""

    def __init__(self, timeout: timedelta | None) -> None:
        self._timeout = timeout
        self._at = None if timeout is None else time.monotonic() + timeout.total_seconds()

    @property
    def left(self) -> timedelta | None:
        """Time until the deadline, at least 0; None if there is no deadline."""
        return (
            None if self._at is None else timedelta(seconds=max(0.0, self._at - time.monotonic()))
        )

    def check(self, what: str) -> None:
        """Raises DeadlineError if the deadline has passed. `what`: description of the awaited
        event."""
        if self._at is not None and time.monotonic() >= self._at:
            assert self._timeout is not None
            raise DeadlineError(
                f"waited {self._timeout.total_seconds():g} s for {what}; pass a longer timeout=, "
                "or None"
            )


class _Watch(Protocol):
    """Function that opens a stream of the events after the event with a given id."""

    def __call__(self, after: str, timeout: timedelta | None, /) -> ResponseStream[Any]: ...


class EventStream:
    """Iterator over the events of a job, oldest first.

    A context manager. Must be iterated over by one thread; `close` ends the iteration and may be
    called from any thread.
    """

    def __init__(
        self,
        watch: _Watch,
        *,
        what: str,
        after: str,
        follow: bool,
        gone: Callable[[], bool],
        timeout: timedelta | None,
        patience: timedelta,
    ) -> None:
        """`gone`: returns whether the coordinator has ended permanently. `patience`: how long a
        followed stream keeps trying to reach a coordinator that does not respond."""
        self._watch = watch
        self._gone = gone
        self._what = what
        self._after = after
        self._follow = follow
        self._deadline = Deadline(timeout)
        self._patience = patience
        self._lock = threading.Lock()
        self._stream: ResponseStream[Any] | None = None
        self._closed = threading.Event()
        self._events = self._run()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        """Ends the iteration. Idempotent."""
        with self._lock:
            self._closed.set()
            if self._stream is not None:
                self._stream.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> Iterator[Event]:
        away_since: float | None = None
        backoff = Backoff(longest_s=_LONGEST_BACKOFF_S)
        while not self._closed.is_set():
            try:
                for message in self._open():
                    self._after, away_since = message.event_id, None
                    yield event_of(message)
                return
            except DeadlineError:
                self._deadline.check(self._what)
                raise
            except UnavailableError as error:
                if self._closed.is_set() or (self._follow and self._gone()):
                    return
                away_since = time.monotonic() if away_since is None else away_since
                if (
                    not self._follow
                    or error.reason == "CLIENT_CLOSED"
                    or time.monotonic() > away_since + self._patience.total_seconds()
                ):
                    raise
                self._closed.wait(backoff.next_s(error))

    def _open(self) -> ResponseStream[Any] | tuple[()]:
        self._deadline.check(self._what)
        with self._lock:
            if self._closed.is_set():
                return ()
            self._stream = self._watch(self._after, self._deadline.left)
            return self._stream


class LogStream:
    """Iterator over the lines of a log, without their line breaks.

    A context manager. Must be iterated over by one thread; `close` ends the iteration and may be
    called from any thread.
    """

    def __init__(
        self,
        path: Path,
        *,
        what: str,
        rank: int | None,
        ended: Callable[[], bool] | None,
        timeout: timedelta | None,
    ) -> None:
        """`rank`: yield only the lines of the worker that was started with this rank. `ended`:
        returns whether the log is complete; None: stop after the lines that exist now."""
        self._path = path
        self._what = what
        self._prefix = "" if rank is None else f"[{rank}]: "
        self._ended = ended
        self._deadline = Deadline(timeout)
        self._closed = threading.Event()
        self._lines = self._run()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        return next(self._lines)

    def close(self) -> None:
        """Ends the iteration. Idempotent."""
        self._closed.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> Iterator[str]:
        with self._path.open("rb") as file:
            rest = b""
            while not self._closed.is_set():
                # checked before reading, since the log is complete once the run has ended
                last = self._ended is None or self._ended()
                while data := file.readline():
                    rest += data
                    if rest.endswith(b"\n"):
                        line, rest = rest, b""
                        yield from self._wanted(line)
                if last:
                    yield from self._wanted(rest)
                    return
                self._deadline.check(self._what)
                self._closed.wait(_LOOK_INTERVAL_S)

    def _wanted(self, line: bytes) -> Iterator[str]:
        text = line.decode(errors="replace").rstrip("\r\n")
        if line and text.startswith(self._prefix):
            yield text
