"""The batches of one epoch that this member holds a lease on: taken first come first served, in the order of leasing, one at a time.

They end by being finished, or are given back when the loop is left.

For asynchronous training: there is no common step, so no rank knows beforehand which batches it gets.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from shoal_worker.elastic.contract import Leases, StepClock

_SHORTEST_RETRY_S = 0.01


class LeasedBatches:
    """Used by one thread."""

    def __init__(self, *, loader: str, epoch: int, batches_in_epoch: int, ahead: int) -> None:
        """`ahead`: leases to hold at once, so that data workers have something to work on."""
        self.epoch = epoch
        self.done = False
        """Every batch of the epoch is finished, here or elsewhere."""
        self._loader = loader
        self._batches_in_epoch = batches_in_epoch
        self._ahead = ahead
        self._held: deque[int] = deque()
        self._announced: deque[int] = deque()
        self._current: int | None = None
        self._finished: list[int] = []

    def take(self, clock: StepClock) -> int | None:
        """The next batch to train on: the one handed out last, if it was not finished. None when there is none now: the epoch is `done`, or
        all batches left are leased elsewhere (then this waits for as long as the coordinator asks before the next try)."""
        if self._current is not None:
            return self._current
        want = self._ahead - len(self._held)
        if want > 0 or self._finished:
            answer = self._lease(clock, max(0, want))
            if not self._held:
                self.done = answer.epoch_done
                if not self.done:
                    time.sleep(max(answer.retry_after_s, _SHORTEST_RETRY_S))
                return None
        self._current = self._held.popleft()
        return self._current

    def coming(self) -> Iterator[int]:
        """The batch taken last, then those held in order, then those leased later: at its end it may go on again."""
        self._announced = deque(self._held)
        if self._current is not None:
            self._announced.appendleft(self._current)
        return _Drain(self._announced)

    def finish(self) -> None:
        """The batch taken last is trained on; the coordinator hears of it with the next lease."""
        assert self._current is not None
        self._finished.append(self._current)
        self._current = None

    def acknowledge(self, clock: StepClock) -> None:
        """The loop is left, and there may be no next lease: tells the coordinator what is finished, and gives the other batches back. Not
        while one is handed out, which may still be finished."""
        if self._current is None and (self._finished or self._held):
            self._lease(clock, 0)
            self._held.clear()

    def _lease(self, clock: StepClock, want: int) -> Leases:
        answer = clock.lease_batches(
            loader=self._loader, epoch=self.epoch, batches_in_epoch=self._batches_in_epoch, finished=tuple(self._finished), want=want
        )
        self._finished.clear()  # only now: acknowledging twice is harmless, losing it is not
        self._held += answer.batches
        self._announced += answer.batches
        return answer


class _Drain:
    """Takes items off a deque; raises StopIteration while it is empty."""

    def __init__(self, items: deque[int]) -> None:
        self._items = items

    def __iter__(self) -> _Drain:
        return self

    def __next__(self) -> int:
        if not self._items:
            raise StopIteration
        return self._items.popleft()
