"""Waiting for a disk within an operation.

A disk may take longer than a collective may, and ranks that wait in one for a rank that waits for its disk would take it for stuck. So all
of them tell each other, again and again, whether they are done.

Runs on the training threads; what is read is read on a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar

from shoal_worker.backends.inmemory_turns import run_aside

if TYPE_CHECKING:
    from shoal_worker.elastic.group import Channel

T = TypeVar("T")

_LOOK: Final = timedelta(seconds=0.5)
"""How often ranks tell each other: well within a collective's time."""


def in_company(channel: Channel, done_within: Callable[[timedelta], bool]) -> None:
    """Returns when all ranks are done. Part of an operation. `done_within(timeout)` waits at most so long, and has a deadline of its own by
    which it says True.

    Raises:
        MembershipChanged: the group is over.
    """
    while True:
        told = channel.exchange(b"done" if done_within(_LOOK) else b"")
        if all(told):
            return


def on_first(channel: Channel, read: Callable[[], T]) -> T | None:
    """What `read` gives on the channel's first rank, once it is there; None on the others. Part of an operation.

    Raises:
        MembershipChanged: the group is over; `read` is left to itself.
        Exception: what `read` raised.
    """
    if channel.rank != 0:
        in_company(channel, lambda _: True)
        return None
    pool = ThreadPoolExecutor(1, thread_name_prefix="reading a checkpoint")
    try:
        reading = pool.submit(read)
        in_company(channel, lambda timeout: _is_done(reading, timeout))
        return reading.result()
    finally:
        pool.shutdown(wait=False)


def _is_done(reading: Future[T], timeout: timedelta) -> bool:
    if not reading.done():
        run_aside(lambda: wait([reading], timeout.total_seconds()), "for a checkpoint to be read")
    return reading.done()
