"""Waiting for a disk within an operation.

A disk may take longer than a collective may, and ranks that wait in one for a rank that waits for its disk would take it for stuck. So all
of them tell each other, again and again, whether they are done.

Runs on the training threads; what the first rank does with its disk, it does on a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from shoal_common.errors import DeadlineError

from shoal_worker.backends.inmemory.turns import run_aside
from shoal_worker.elastic.waiting_lines import WaitingLines

if TYPE_CHECKING:
    from shoal_worker.elastic.group import Channel

T = TypeVar("T")

_LOOK: Final = timedelta(seconds=0.5)
"""How often ranks tell each other: well within a collective's time."""


DISK_PATIENCE: Final = timedelta(minutes=30)
"""How long a disk may take."""


def in_company(channel: Channel, done_within: Callable[[timedelta], bool], *, patience: timedelta = DISK_PATIENCE) -> None:
    """Returns when all ranks are done, or have waited for `patience`. Part of an operation. `done_within(timeout)` waits at most so long.
    The first rank says every ten seconds in the log who is not done.

    Raises:
        MembershipChanged: the group is over.
    """
    give_up_at, lines = time.monotonic() + patience.total_seconds(), WaitingLines()
    while True:
        told = channel.exchange(b"done" if done_within(_LOOK) or time.monotonic() > give_up_at else b"")
        busy = [rank for rank, done in enumerate(told) if not done]
        if not busy:
            return
        if channel.rank == 0:
            lines.say("a checkpoint's files", partial("the disks of ranks {} of {} have not answered".format, busy, len(told)))


def on_first(channel: Channel, work: Callable[[], T], *, patience: timedelta = DISK_PATIENCE) -> T | None:
    """What `work`, which reads or writes files, gives on the channel's first rank, once it is there; None on the others. Part of an
    operation.

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
                f"the files were not read or written within {patience.total_seconds():g} s; is the disk there?", reason="CHECKPOINT_SLOW"
            )
        return working.result()
    finally:
        pool.shutdown(wait=False)


def _is_done(working: Future[T], timeout: timedelta) -> bool:
    if not working.done():
        run_aside(lambda: wait([working], timeout.total_seconds()), "for the disk")
    return working.done()
