"""Writes checkpoints beside the training: one at a time, on a thread of its own.

The training thread calls every method; the job runs on the writer's thread and shares nothing with
the training but what it was given. `_lock` guards `_error`; all else is the training thread's own.
The thread is no daemon: a process that ends normally finishes the checkpoint under way first.
"""

from __future__ import annotations

import json
import logging
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
from shoal_worker.elastic.waiting import WaitingLines

if TYPE_CHECKING:
    from shoal_worker.elastic.channel import Channel

# --------------------------------------------------------------------------------------- the writer

_log = logging.getLogger(__name__)


class CheckpointWriter:
    """At most one job is under way; the next waits for it.

    An error of a job is raised once, by the next call of any method, and logged at once.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._begun = 0.0
        """When the job under way did."""
        self._lock = threading.Lock()
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        return self._thread is not None and self._thread.is_alive()

    def done_within(self, timeout: timedelta) -> bool:
        """Waits for the job under way, but no longer than that. True: none is."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            # Aside: where ranks take turns, it may wait for what another rank writes.
            run_aside(lambda: thread.join(timeout.total_seconds()), f"until {thread.name} is done")
        return not self.busy

    def wait(self, timeout: timedelta) -> None:
        """Returns when no job is under way. To be called before the next copy is made, so that
        there is never more than one.

        Raises:
            DeadlineError: the job takes `timeout` longer; it goes on.
            Exception: what the last job raised.
        """
        if not self.done_within(timeout):
            assert self._thread is not None
            raise DeadlineError(
                f"{self._thread.name} is not done after {time.monotonic() - self._begun:.0f} s; is "
                "the disk too slow?",
                reason="CHECKPOINT_SLOW",
            )
        self._thread = None
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def submit(self, job: Callable[[], object], *, what: str, timeout: timedelta) -> None:
        """Starts `job` after the one under way. `what` names it in errors: "writing step-5 to
        ckpt/".

        Raises as `wait` does, without starting the job.
        """
        self.wait(timeout)
        self._thread, self._begun = (
            threading.Thread(target=self._run, args=(job, what), name=what),
            time.monotonic(),
        )
        self._thread.start()

    def close(self, timeout: timedelta) -> None:
        """Waits for the job under way. Raises as `wait` does. The writer can be used again."""
        self.wait(timeout)

    def _run(self, job: Callable[[], object], what: str) -> None:
        try:
            job()
        except Exception as error:
            _log.error("%s failed: %s", what, error)
            with self._lock:
                self._error = error


# ------------------------------------------------------------------------------- waiting for a disk
#
# Waiting for a disk within an operation.
#
# A disk may take longer than a collective may, and ranks that wait in one for a rank that waits for
# its disk would take it for stuck. So all of them tell each other, again and again, whether they
# are done.
#
# Runs on the training threads; what the first rank does with its disk, it does on a thread of its
# own.

T = TypeVar("T")

_LOOK: Final = timedelta(seconds=0.5)
"""How often ranks tell each other: well within a collective's time."""


DISK_PATIENCE: Final = timedelta(minutes=30)
"""How long a disk may take."""


def in_company(
    channel: Channel,
    done_within: Callable[[timedelta], bool],
    *,
    patience: timedelta = DISK_PATIENCE,
) -> None:
    """Returns when all ranks are done, or have waited for `patience`. Part of an operation.
    `done_within(timeout)` waits at most so long. The first rank says every ten seconds in the log
    who is not done.

    Raises:
        MembershipChanged: the group is over.
    """
    give_up_at, lines = time.monotonic() + patience.total_seconds(), WaitingLines()
    while True:
        told = channel.exchange(
            b"done" if done_within(_LOOK) or time.monotonic() > give_up_at else b""
        )
        busy = [rank for rank, done in enumerate(told) if not done]
        if not busy:
            return
        if channel.rank == 0:
            lines.say(
                "a checkpoint's files",
                partial("the disks of ranks {} of {} have not answered".format, busy, len(told)),
            )


def on_first(
    channel: Channel, work: Callable[[], T], *, patience: timedelta = DISK_PATIENCE
) -> T | None:
    """What `work`, which reads or writes files, gives on the channel's first rank, once it is
    there; None on the others. Part of an operation.

    Raises:
        MembershipChanged: the group is over; `work` is left to itself.
        DeadlineError: it took longer than `patience`, and is left to itself.
        Exception: what `work` raised.
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
                f"the files were not read or written within {patience.total_seconds():g} s; is the "
                "disk there?",
                reason="CHECKPOINT_SLOW",
            )
        return working.result()
    finally:
        pool.shutdown(wait=False)


def on_each(
    channel: Channel, work: Callable[[threading.Event], Any], *, patience: timedelta = DISK_PATIENCE
) -> list[Any]:
    """What `work`, which may take longer than a collective, gives on each rank, by rank: JSON
    values. It is on a thread of its own, and is to end soon once the event that it gets is set.
    Part of an operation.

    Raises:
        MembershipChanged: the group is over; `work` has ended.
        ShoalError: what `work` raised, on all ranks: on those where it did not, with the rank's
            number.
    """
    given_up = threading.Event()
    pool = ThreadPoolExecutor(1, thread_name_prefix="shoal-rows")
    working = pool.submit(work, given_up)
    try:
        in_company(channel, lambda timeout: _is_done(working, timeout), patience=patience)
    finally:
        given_up.set()
        run_aside(lambda: wait([working]), "for what was given up")
        pool.shutdown(wait=False)
    error = working.exception()
    if isinstance(error, MembershipChanged | StaleGenerationError):
        raise MembershipChanged(str(error)) from error
    told = (
        {
            "error": str(error),
            "reason": getattr(error, "reason", ""),
            "code": getattr(error, "code", ""),
        }
        if error is not None
        else {}
    )
    told = told or {"result": working.result()}
    everyones = [json.loads(each) for each in channel.exchange(json.dumps(told).encode())]
    if error is not None:
        raise error
    for rank, each in enumerate(everyones):
        if "error" in each:
            kind = next((kind for kind in _TOLD if kind.code == each["code"]), UnavailableError)
            raise kind(f"rank {rank}: {each['error']}", reason=each["reason"] or None)
    return [each["result"] for each in everyones]


_TOLD: Final[tuple[type[ShoalError], ...]] = (
    CorruptDataError,
    DeadlineError,
    InvalidRequestError,
    LimitError,
    PreconditionError,
)
"""What other ranks raise as it is."""


def _is_done(working: Future[T], timeout: timedelta) -> bool:
    if not working.done():
        run_aside(lambda: wait([working], timeout.total_seconds()), "for the disk")
    return working.done()
