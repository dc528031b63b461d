"""Work objects of an MPI group. A work makes progress by repeatedly testing its MPI requests.

MPI moves data only while it is called. Waits therefore poll with growing pauses, and check between
polls whether the group has ended or their deadline has passed. While there are incomplete futures,
one thread per process polls for all of them, because torch waits for a future in C++. Importing
this module starts MPI.

Threads: the waiting thread and the polling thread may advance a work; the work's lock ensures that
only one does so at a time.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from mpi4py import MPI
from shoal_common.errors import InvalidRequestError, ShoalError
from torch.distributed import Work

from shoal_worker.backends.base import GroupEndedError

_EAGER_TESTS: Final = 20
"""Number of tests of a work before the first pause."""
_LONGEST_PAUSE_S: Final = 0.001
_POLLING_PAUSE_S: Final = 0.0002


class Owner(Protocol):
    """Interface that a work requires of the group that has issued it."""

    @property
    def timeout(self) -> timedelta:
        """Time limit of a wait for other ranks."""
        ...

    def abort(self, reason: str) -> None:
        """Aborts the group."""
        ...

    def check_live(self) -> None:
        """Raises GroupEndedError if the group has ended."""
        ...

    def finished(self, work: MPIWork) -> None:
        """Records a work that MPI has completed. Called once per work."""
        ...


class MPIWork(Work):
    """An issued collective or transfer."""

    def __init__(
        self,
        what: str,
        group: Owner,
        requests: list[Any],
        finish: list[Callable[[], None]],
        kept: Sequence[Any],
        result: list[Any],
    ) -> None:
        """`finish`: functions that write the result once MPI has completed the requests.
        `kept`: objects kept alive until then.
        """
        super().__init__()
        self._what = what
        self._group = group
        self._requests = requests
        self._finish = finish
        self._kept = kept
        self._result = result
        self._done = False
        self._failure: tuple[type[Exception], str] | None = None
        self._statuses: list[Any] = [MPI.Status() for _ in requests]
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the result has arrived. A `timeout` of None or 0 means the group's timeout.

        Raises GroupEndedError if the group has ended, or if this call aborts it after the timeout,
        and InvalidRequestError for a message that is longer than its destination.
        """
        limit = timeout or self._group.timeout
        deadline = time.monotonic() + limit.total_seconds()
        tests = 0
        while not self.advance():
            tests += 1
            if tests < _EAGER_TESTS:
                time.sleep(0)  # the peer may run on the same core
            else:
                time.sleep(min(_LONGEST_PAUSE_S, 1e-5 * tests))
            if time.monotonic() > deadline:
                self._group.abort(
                    f"{self._what}: waited {limit.total_seconds():g} s for the other ranks"
                )
        if self._failure is not None:
            kind, text = self._failure
            raise kind(text)
        return True

    def advance(self) -> bool:
        """Lets MPI make progress and returns whether the work has ended."""
        with self._lock:
            if self._done:
                return True
            try:
                if MPI.Request.Testall(self._requests, self._statuses):
                    for finish in self._finish:
                        finish()
                else:
                    self._group.check_live()
                    return False
            except MPI.Exception as error:
                self._failure = self._failure_of(error)
            except (ShoalError, RuntimeError, ValueError) as error:
                self._failure = type(error), str(error)
            self._done = True
            if self._failure is None:
                self._requests, self._finish, self._kept = [], [], []
            else:
                # MPI may still write to these buffers.
                _ABANDONED.append((self._requests, self._finish, self._kept))
        self._group.finished(self)
        return True

    def is_completed(self) -> bool:
        """Returns whether `wait` would return or raise immediately."""
        return self.advance()

    def is_success(self) -> bool:
        """Returns whether the result has arrived."""
        return self._done and self._failure is None

    def result(self) -> list[Any]:
        """Returns the output tensors, structured as torch passed them."""
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future of the output tensors."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self.advance() or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
                self.settle()
            else:
                _POLLER.follow(self)
        return self._future

    def settle(self) -> None:
        """Completes the future once the work has ended."""
        future = self._future
        assert future is not None
        try:
            self.wait()
        except (ShoalError, RuntimeError, ValueError) as error:
            future.set_exception(error)
        else:
            future.set_result(self._result)

    def _source_rank(self) -> int:
        """Returns the rank that sent a message received from any rank. Called by torch after
        `wait`."""
        return int(self._statuses[0].Get_source())

    def _failure_of(self, error: Any) -> tuple[type[Exception], str]:
        codes = [
            status.Get_error()
            for status in self._statuses
            if error.Get_error_class() == MPI.ERR_IN_STATUS
        ]
        failed = [code for code in codes if code not in (MPI.SUCCESS, MPI.ERR_PENDING)] or [
            error.Get_error_code()
        ]
        if MPI.Get_error_class(failed[0]) == MPI.ERR_TRUNCATE:
            return (
                InvalidRequestError,
                f"{self._what}: the message is longer than the tensor that receives it",
            )
        reason = f"{self._what} failed: {MPI.Get_error_string(failed[0])}"
        self._group.abort(reason)
        return GroupEndedError, reason


class _Poller:
    """Advances works with incomplete futures, on one thread."""

    def __init__(self) -> None:
        self._works: list[MPIWork] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._over = False

    def follow(self, work: MPIWork) -> None:
        """Polls `work` until it has ended, and then completes its future."""
        with self._changed:
            self._works.append(work)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="shoal-mpi-progress", daemon=True
                )
                self._thread.start()
                atexit.register(self._end)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._works) or self._over)
                if self._over:
                    return
                works = list(self._works)
            over = [work for work in works if work.advance()]
            for work in over:
                work.settle()
            with self._changed:
                self._works = [work for work in self._works if work not in over]
            time.sleep(_POLLING_PAUSE_S)

    def _end(self) -> None:
        """Stops polling before MPI is finalized."""
        with self._changed:
            self._over = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()


_POLLER: Final = _Poller()
_ABANDONED: Final[list[Any]] = []
"""Requests and buffers of ended groups that MPI may still use."""
