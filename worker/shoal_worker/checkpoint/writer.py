"""Writes checkpoints during training: one at a time, on a separate thread.

All methods are called on the training thread. A job runs on the writer's thread and shares only its
arguments with training. `_lock` guards `_error`; everything else belongs to the training thread.
The thread is not a daemon, so a process that exits normally first finishes the current checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from shoal_common.errors import (
    CorruptDataError,
    DeadlineError,
    InvalidRequestError,
    LimitError,
    MembershipChanged,
    PreconditionError,
    ShoalError,
    StaleGenerationError,
    UnavailableError,
)

from shoal_worker.backends.inmemory.turns import run_aside
from shoal_worker.elastic.group.waiting import WaitingLines

if TYPE_CHECKING:
    from shoal_worker.elastic.contract.channel import Channel

# --------------------------------------------------------------------------------------- the writer

_log = logging.getLogger(__name__)

_NICENESS: Final = 10
"""Steps by which the writing thread's priority is lower than that of training. If all cores are
busy, training continues at nearly full speed, and writing takes longer."""


class CheckpointWriter:
    """Runs one job at a time; the next job waits for the current one.

    A job's error is logged immediately, and raised once by the next method call.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._begun = 0.0
        """Start time of the current job, by the monotonic clock, in seconds."""
        self._lock = threading.Lock()
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        """True if a job is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def done_within(self, timeout: timedelta) -> bool:
        """Waits up to `timeout` for the current job. Returns whether no job is in progress any
        more."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            # On a separate thread, because a job may wait for another rank to write, and ranks may
            # take turns.
            run_aside(lambda: thread.join(timeout.total_seconds()), f"until {thread.name} is done")
        return not self.busy

    def wait(self, timeout: timedelta) -> None:
        """Waits until no job is in progress. Must be called before the state is copied again, so
        that there is never more than one copy in memory.

        Raises:
            DeadlineError: the job takes longer than `timeout`; it continues.
            Exception: the error of the last job.
        """
        if not self.done_within(timeout):
            assert self._thread is not None
            raise DeadlineError(
                f"{self._thread.name} did not finish within {time.monotonic() - self._begun:.0f} "
                "s; check whether the disk is too slow",
                reason="CHECKPOINT_SLOW",
            )
        self._thread = None
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def submit(self, job: Callable[[], object], *, what: str, timeout: timedelta) -> None:
        """Waits for the current job, and then starts `job`. `what`: description of the job for
        errors, such as "writing step-5 to ckpt/".

        Raises the same errors as `wait`, without starting the job.
        """
        self.wait(timeout)
        self._thread, self._begun = (
            threading.Thread(target=self._run, args=(job, what), name=what),
            time.monotonic(),
        )
        self._thread.start()

    def close(self, timeout: timedelta) -> None:
        """Waits for the current job. Raises the same errors as `wait`. The writer can still be used
        afterwards."""
        self.wait(timeout)

    def _run(self, job: Callable[[], object], what: str) -> None:
        with contextlib.suppress(OSError):  # a sandbox may not allow it
            os.nice(_NICENESS)  # on Linux, of this thread only
        try:
            job()
        except Exception as error:
            _log.error("%s failed: %s", what, error)
            with self._lock:
                self._error = error


# Waiting for a disk or an object store within an operation. This wait may take longer than a
# collective's timeout. If the other ranks waited in a collective, they would mistake the rank that
# accesses the disk for a stuck rank. All ranks therefore report to one another repeatedly whether
# they are done. Runs on the training threads; disk access runs on separate threads.

T = TypeVar("T")

_LOOK: Final = timedelta(seconds=0.5)
"""Interval between the exchanges of `in_company`; much shorter than a collective's timeout."""


DISK_PATIENCE: Final = timedelta(minutes=30)
"""Maximum time to wait for a disk."""


def in_company(
    channel: Channel,
    done_within: Callable[[timedelta], bool],
    *,
    patience: timedelta = DISK_PATIENCE,
) -> None:
    """Waits until each rank has finished its own work with files, or has waited for `patience`.
    Must be called on all ranks, within an operation. The first rank logs every ten seconds which
    ranks have not finished.

    `done_within(timeout)`: waits for at most `timeout` and returns whether this rank has finished.

    Raises:
        MembershipChanged: the group has ended.
    """
    give_up_at, lines = time.monotonic() + patience.total_seconds(), WaitingLines()
    while True:
        replies = channel.exchange(
            b"done" if done_within(_LOOK) or time.monotonic() > give_up_at else b""
        )
        busy = [rank for rank, done in enumerate(replies) if not done]
        if not busy:
            return
        if channel.rank == 0:
            lines.say(
                "a checkpoint's files",
                partial(
                    "ranks {} of {} are still reading or writing them".format, busy, len(replies)
                ),
            )


def on_first(
    channel: Channel, work: Callable[[], T], *, patience: timedelta = DISK_PATIENCE
) -> T | None:
    """Runs `work`, which accesses files, on the channel's first rank and returns the result there.
    Returns None on the other ranks. Must be called on all ranks, within an operation.

    Raises:
        MembershipChanged: the group has ended; `work` is abandoned.
        DeadlineError: `work` took longer than `patience` and is abandoned.
        Exception: the error of `work`.
    """
    if channel.rank != 0:
        in_company(channel, lambda _: True)
        return None
    pool = ThreadPoolExecutor(1, thread_name_prefix="shoal-disk")
    try:
        working = pool.submit(work)
        in_company(channel, lambda timeout: _is_done(working, timeout), patience=patience)
        if not working.done():
            raise DeadlineError(
                f"the files were not read or written within {patience.total_seconds():g} s; is "
                "the disk or the object store available?",
                reason="CHECKPOINT_SLOW",
            )
        return working.result()
    finally:
        pool.shutdown(wait=False)


def on_each(
    channel: Channel, work: Callable[[threading.Event], Any], *, patience: timedelta = DISK_PATIENCE
) -> list[Any]:
    """Runs `work`, which may take longer than a collective, on a separate thread of each rank.
    Returns the results, which are JSON values, in rank order. `work` receives an event and should
    return soon once the event is set. Must be called on all ranks, within an operation.

    Raises:
        MembershipChanged: the group has ended; `work` has stopped.
        ShoalError: the error of `work`, on all ranks. On ranks where `work` did not fail, the error
            names the failing rank.
    """
    given_up = threading.Event()
    pool = ThreadPoolExecutor(1, thread_name_prefix="shoal-rows")
    working = pool.submit(work, given_up)
    try:
        in_company(channel, lambda timeout: _is_done(working, timeout), patience=patience)
    finally:
        given_up.set()
        run_aside(lambda: wait([working]), "for abandoned work to end")
        pool.shutdown(wait=False)
    error = working.exception()
    if isinstance(error, MembershipChanged | StaleGenerationError):
        raise MembershipChanged(str(error)) from error
    outcome = (
        {
            "error": str(error),
            "reason": getattr(error, "reason", ""),
            "code": getattr(error, "code", ""),
        }
        if error is not None
        else {}
    )
    outcome = outcome or {"result": working.result()}
    everyones = [json.loads(each) for each in channel.exchange(json.dumps(outcome).encode())]
    if error is not None:
        raise error
    for rank, each in enumerate(everyones):
        if "error" in each:
            kind = next(
                (kind for kind in _RAISED_UNCHANGED if kind.code == each["code"]), UnavailableError
            )
            raise kind(f"rank {rank}: {each['error']}", reason=each["reason"] or None)
    return [each["result"] for each in everyones]


_RAISED_UNCHANGED: Final[tuple[type[ShoalError], ...]] = (
    CorruptDataError,
    DeadlineError,
    InvalidRequestError,
    LimitError,
    PreconditionError,
)
"""Error types that ranks raise unchanged even if `work` did not fail on them."""


def _is_done(working: Future[T], timeout: timedelta) -> bool:
    if not working.done():
        run_aside(lambda: wait([working], timeout.total_seconds()), "for the disk")
    return working.done()
