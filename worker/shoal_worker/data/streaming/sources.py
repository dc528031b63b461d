"""The sources of a stream: the stream itself, or its shards. Each source is read by this process or
by a data worker that reads ahead.

A data worker is a process that only reads some of the sources. The items of a source depend on the
position at which the source was opened, not on the worker or on how far it has read ahead. The rank
requests items from the worker, and receives no more items than it would have read itself. Workers
know nothing about ranks and steps. They run until the epoch ends or the script leaves the loop, and
die with their rank (`fetch.py`). If a source raises an error in a worker, the rank raises the error
when it reaches that item.

May be used by only one thread. The worker's side runs on the only thread of the worker process.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import itertools
import multiprocessing
import multiprocessing.connection
import pickle
import signal
import traceback
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from shoal_common.errors import ConfigurationError, InternalError, PreconditionError
from typing_extensions import override

from shoal_worker.child_processes import explained_pickling
from shoal_worker.data.fetch import tie_to_parent
from shoal_worker.data.streaming.reader import Mark, Reader, SourceReader

_END_WITHIN_S: Final = 2.0
"""Time that a worker has to exit before it is killed, in seconds. The worker may be in the middle
of an item."""

_SLICE_S: Final = 0.2
"""Length of one wait, in seconds. A signal handler runs on the main thread between two
instructions, so a signal that arrives just before a wait does not end the wait."""

_ANSWERED: Final = ("fill", "items")
"""Requests that the worker answers."""

Make = Callable[[], Iterable[Any]]


class Sources:
    """Opens the sources of a stream by index, in this process or in data workers."""

    def __init__(self, makes: Sequence[Make], *, num_workers: int, ahead: int) -> None:
        """`makes`: functions that create the sources. `num_workers`: number of processes that read
        the sources; 0: this process reads them. `ahead`: number of items of each source that a
        worker reads ahead, beyond the items that were requested."""
        self._makes = makes
        self.ahead = ahead
        """Number of items that workers read ahead, per source. A change applies only to workers
        that are started later."""
        self._num_workers = num_workers
        self._workers: list[_Worker] = []

    def open(self, number: int, *, key: Sequence[int], name: str, at: Mark | None = None) -> Reader:
        """Returns a reader of a source.

        Args:
            number: index of the source.
            key: key from which the source's random numbers are seeded.
            name: name of the source in error messages.
            at: starting position; None: the beginning.

        Raises:
            PreconditionError (STREAM_NOT_REPEATED): the source yielded different items before `at`
                than it did originally. With a data worker, `fill` raises this error instead.
        """
        if not self._num_workers:
            return SourceReader(self._makes[number], key=key, name=name, at=at)
        if not self._workers:
            # At process exit multiprocessing would send SIGTERM to the workers, which ignore it.
            atexit.register(self.close)
            with explained_pickling(self._num_workers):
                for _ in range(self._num_workers):
                    self._workers.append(_Worker(self._makes, self.ahead))
        worker = min(self._workers, key=lambda each: each.open_readers)
        return RemoteReader(worker, number, key=key, name=name, at=at or Mark())

    @property
    def has_workers(self) -> bool:
        """True if data workers read the sources."""
        return self._num_workers > 0

    @property
    def at_once(self) -> int:
        """Number of sources that should be open at the same time, so that every data worker reads
        one."""
        return max(1, self._num_workers)

    def close(self) -> None:
        """Stops the workers and their readers. The next `open` starts new workers, which get the
        state that the sources have at that time."""
        atexit.unregister(self.close)
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.request_end()
        for worker in workers:
            worker.end()


class RemoteReader(Reader):
    """Reads a source by requests to a data worker."""

    def __init__(
        self, worker: _Worker, number: int, *, key: Sequence[int], name: str, at: Mark
    ) -> None:
        super().__init__(at)
        self._worker = worker
        self._name = name
        self._expected: tuple[int, int] | None = None
        """Position that the worker has been asked to read up to, and number of that request; None
        if no request is pending."""
        self._id = worker.open(number, tuple(key), name, at)

    @override
    def expect(self, upto: int, *, states_at: Container[int] = ()) -> None:
        self._forget()
        if self.end is None and self.stop < upto:
            self._expected = upto, self._worker.ask("fill", self._id, self.stop, upto, states_at)

    @override
    def fill(self, upto: int, *, states_at: Container[int] = ()) -> None:
        if self.end is not None or self.stop >= upto:
            return
        if self._expected is None or self._expected[0] != upto:
            self.expect(upto, states_at=states_at)
        assert self._expected is not None
        (_, question), self._expected = self._expected, None
        prints, states, self.end = self._worker.answer(question, self._name)
        self._prints.extend(prints)
        self._states.update(states)

    def items(self, positions: Iterable[int]) -> list[Any]:
        """Implements `Reader.items`. Does not copy the items, because items received from another
        process are already copies."""
        given: list[Any] = self._worker.answer(
            self._worker.ask("items", self._id, list(positions)), self._name
        )
        return given

    @override
    def drop(self, position: int) -> None:
        if position > self.first:
            self._worker.ask("drop", self._id, position)
        super().drop(position)

    @override
    def close(self) -> None:
        self._forget()
        self._worker.close(self._id)
        self._prints.clear()

    def _forget(self) -> None:
        if self._expected is not None:
            self._worker.forget(self._expected[1])
        self._expected = None


class _Worker:
    """A rank's connection to one data worker."""

    def __init__(self, makes: Sequence[Make], ahead: int) -> None:
        self._open: set[int] = set()
        self._ids = itertools.count()
        self._questions = itertools.count()
        self._unanswered: set[int] = set()
        self._forgotten: set[int] = set()
        """Numbers of requests whose responses are no longer needed."""
        self._answers: dict[int, tuple[Any, tuple[bytes | None, str] | None]] = {}
        """Responses that arrived before a caller awaited them, by request number."""
        context = multiprocessing.get_context()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, makes, ahead), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def open_readers(self) -> int:
        """Number of sources that the worker is reading."""
        return len(self._open)

    def open(self, number: int, key: tuple[int, ...], name: str, at: Mark) -> int:
        """Opens the source with index `number` in the worker and returns the identifier of the new
        reader."""
        reader = next(self._ids)
        self._open.add(reader)
        self.ask("open", reader, number, key, name, at)
        return reader

    def close(self, reader: int) -> None:
        """Closes a reader in the worker."""
        if reader in self._open:
            self._open.discard(reader)
            self.ask("close", reader)

    def ask(self, what: str, *arguments: Any) -> int:
        """Sends a request and returns its number. If the worker is dead, `answer` raises the error.

        Several `fill` requests may be pending at the same time. Any other request first waits for
        their responses; otherwise a long request and a long response would block each other.
        """
        question = next(self._questions)
        with contextlib.suppress(EOFError, OSError):
            while what != "fill" and self._unanswered:
                self._hear()
            self._connection.send_bytes(_dumped((question, what, *arguments)))
            if what in _ANSWERED:
                self._unanswered.add(question)
        return question

    def answer(self, question: int, name: str) -> Any:
        """Waits for the response to a request and returns it. `name`: name of the source in error
        messages.

        Raises:
            PreconditionError (DATA_WORKER_DIED): the worker is dead.
            Exception: the error that the source raised.
        """
        try:
            while question not in self._answers:
                self._hear()
        except (EOFError, OSError):
            raise self._died(name) from None
        answer_bytes, error = self._answers.pop(question)
        if error is not None:
            _raise(error, name)
        return answer_bytes

    def forget(self, question: int) -> None:
        """Discards the response to a request."""
        self._forgotten.add(question)
        self._answers.pop(question, None)

    def _hear(self) -> None:
        """Waits for the next response. Raises EOFError or OSError if the worker is dead."""
        ready: Sequence[object] = ()
        while not ready:
            ready = multiprocessing.connection.wait(
                [self._connection, self._process.sentinel], _SLICE_S
            )
        if not self._connection.poll():
            raise EOFError
        question, answer_bytes, error = _loaded(self._connection.recv_bytes())
        self._unanswered.discard(question)
        if question in self._forgotten:
            self._forgotten.discard(question)
        else:
            self._answers[question] = answer_bytes, error

    def request_end(self) -> None:
        """Asks the worker to exit."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(_dumped((next(self._questions), "end")))
        self._connection.close()

    def end(self) -> None:
        """Waits until the worker exits, and kills it if that takes too long."""
        self._process.join(_END_WITHIN_S)
        if self._process.exitcode is None:
            self._process.kill()
            # if the kernel keeps the worker in an uninterruptible call, the worker dies when the
            # call returns
            self._process.join(_END_WITHIN_S)
        with contextlib.suppress(ValueError):
            # another thread has reaped the worker, so multiprocessing considers it alive
            self._process.close()

    def _died(self, name: str) -> PreconditionError:
        self._process.join(_END_WITHIN_S)
        code = self._process.exitcode
        how = "is gone"
        if code is not None:  # otherwise another thread has reaped the worker
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with exit code {code}"
            )
        return PreconditionError(
            f"{name}: the data worker that reads it {how}. If the system ran out of memory, use "
            "fewer data workers (num_workers=) or smaller batches. With num_workers=0 the rank "
            "reads the data itself and shows the error",
            reason="DATA_WORKER_DIED",
        )


class ReadingFailed(Exception):
    """Cause (`__cause__`) of an error that was raised in a data worker. Shows where in the worker
    the error was raised."""


def _raise(error: tuple[bytes | None, str], name: str) -> None:
    """Raises an error reported by a data worker."""
    pickled, trace = error
    where = ReadingFailed(f"in the data worker:\n{trace}")
    if pickled is None:
        raise InternalError(
            f"{name}: reading failed in the data worker: {trace.strip().splitlines()[-1]}"
        ) from where
    raise _loaded(pickled) from where


class _Pickler(pickle.Pickler):
    """Pickles a tensor as an array of its values, because torch's own reducer would write each
    tensor to a file."""

    def reducer_override(self, value: Any) -> Any:
        """Implements `pickle.Pickler.reducer_override`."""
        if (
            type(value) is torch.Tensor
            and value.device.type == "cpu"
            and value.layout is torch.strided
            and not value.requires_grad
        ):
            with contextlib.suppress(TypeError):  # numpy has no corresponding dtype
                return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _dumped(value: Any) -> bytes:
    written = io.BytesIO()
    _Pickler(written, protocol=5).dump(value)
    return written.getvalue()


def _loaded(data: bytes) -> Any:
    # sent between a rank and its own child over a private pipe
    return pickle.loads(data)  # noqa: S301


# -------------------------------------------------------------------------------- the worker's side


@dataclass
class _Opened:
    """A source that this worker reads, with its reader."""

    reader: SourceReader | None = None
    upto: int = 0
    """Position where the worker stops reading ahead."""
    states_at: Container[int] = ()
    failed: tuple[bytes | None, str] | None = None
    """Error raised while the source was opened or read ahead. It becomes the response to the next
    request."""

    @property
    def goes_on(self) -> bool:
        reader = self.reader
        return (
            reader is not None
            and self.failed is None
            and reader.end is None
            and reader.stop < self.upto
        )


def _serve(
    connection: multiprocessing.connection.Connection, makes: Sequence[Make], ahead: int
) -> None:
    """Runs a data worker: responds to requests, and reads ahead while no request is pending."""
    tie_to_parent(0)
    # if Ctrl-C reaches all processes, the rank decides how to handle it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    opened: dict[int, _Opened] = {}
    while True:
        busy = [each for each in opened.values() if each.goes_on]
        if busy and not connection.poll():
            one = min(
                busy,
                key=lambda each: each.reader.stop - each.upto if each.reader is not None else 0,
            )
            _read(one, one.reader.stop + 1 if one.reader is not None else 0)
            continue
        try:
            question, what, *arguments = _loaded(connection.recv_bytes())
            if what == "end":
                return
            answer = _answer(opened, makes, ahead, what, *arguments)
            if what in _ANSWERED:
                connection.send_bytes(_packed(question, *answer))
        except (EOFError, OSError):
            return


def _answer(
    opened: dict[int, _Opened],
    makes: Sequence[Make],
    ahead: int,
    what: str,
    reader: int,
    *arguments: Any,
) -> tuple[Any, tuple[bytes | None, str] | None]:
    """Returns the response to a request about one reader, or the error that occurred."""
    if what == "open":
        number, key, name, at = arguments
        one = opened[reader] = _Opened()
        try:
            one.reader = SourceReader(makes[number], key=key, name=name, at=at)
        except Exception as error:  # a source may raise any error
            one.failed = _described(error)
        return None, None
    one = opened[reader]
    if what == "close":
        del opened[reader]
        if one.reader is not None:
            one.reader.close()
        return None, None
    if one.reader is None:
        return None, one.failed
    if what == "drop":
        one.reader.drop(*arguments)
        return None, None
    if what == "items":
        return one.reader.raw_items(*arguments), None
    known, upto, one.states_at = arguments
    one.upto = upto + ahead
    _read(one, upto)
    if one.failed is not None and one.reader.stop < upto:
        return None, one.failed
    return one.reader.news(known, upto), None


def _read(one: _Opened, upto: int) -> None:
    """Continues reading a source, unless reading has failed before."""
    assert one.reader is not None
    if one.failed is None:
        try:
            one.reader.fill(upto, states_at=one.states_at)
        except Exception as error:  # a source may raise any error
            one.failed = _described(error)


def _described(error: Exception) -> tuple[bytes | None, str]:
    """Encodes an error, with its traceback, so that another process can raise it."""
    trace = "".join(traceback.format_exception(error))
    try:
        pickled = _dumped(error)
        _loaded(pickled)
    except Exception:  # parts of the error may raise any error
        return None, trace
    return pickled, trace


def _packed(question: int, answer: Any, error: tuple[bytes | None, str] | None) -> bytes:
    try:
        return _dumped((question, answer, error))
    except Exception as failure:  # parts of an item may raise any error
        refusal = ConfigurationError(
            f"an item of the stream cannot be sent by its data worker ({type(failure).__name__}: "
            f"{failure}): yield items that can be pickled, such as tensors, arrays, strings and "
            "numbers, or leave num_workers out"
        )
        return _dumped((question, None, _described(refusal)))
