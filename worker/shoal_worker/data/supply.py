"""Where a loader's next step comes from: dealt to the rank by its place in the world, or leased first come first served.

Owns the step that this rank was dealt and that is not committed yet, and the leases: batches that this member took first come first served,
in the order of leasing, which end by being finished, or are given back when the loop is left. Moves the cursor of the `Course` when a step
commits, or when an epoch turns out to have none left. It fetches nothing. Used by the training thread alone."""

from __future__ import annotations

import abc
import time
from collections import deque
from collections.abc import Iterator
from typing import ClassVar

from shoal_worker.data.cursor import Course, Cursor
from shoal_worker.data.dealer import Dealer, DealtStep
from shoal_worker.data.fetch import Request
from shoal_worker.elastic.loader_interface import Leases, LoaderSession, Placement

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

    def take(self, session: LoaderSession) -> int | None:
        """The next batch to train on: the one handed out last, if it was not finished. None when there is none now: the epoch is `done`, or
        all batches left are leased elsewhere (then this waits for as long as the coordinator asks before the next try)."""
        if self._current is not None:
            return self._current
        want = self._ahead - len(self._held)
        if want > 0 or self._finished:
            answer = self._lease(session, max(0, want))
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

    def acknowledge(self, session: LoaderSession) -> None:
        """The loop is left, and there may be no next lease: tells the coordinator what is finished, and gives the other batches back. Not
        while one is handed out, which may still be finished."""
        if self._current is None and (self._finished or self._held):
            self._lease(session, 0)
            self._held.clear()

    def _lease(self, session: LoaderSession, want: int) -> Leases:
        answer = session.lease_batches(
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


class Supply(abc.ABC):
    """Deals one step after the other; the same one again until it is committed."""

    leased: ClassVar[bool]

    def __init__(self, dealer: Dealer, course: Course) -> None:
        self.current: DealtStep | None = None
        """Dealt, and neither committed nor dropped."""
        self._dealer = dealer
        self._course = course

    @abc.abstractmethod
    def take(self, placement: Placement, session: LoaderSession, loader: str) -> DealtStep | None:
        """The next step, which becomes the current one; None when there is none now, or the epoch is over."""

    @abc.abstractmethod
    def following(self, dealt: DealtStep, request: Request) -> Iterator[Request]:
        """`request`, of `dealt`, and what will probably be needed after it."""

    def drop(self) -> None:
        """The current step was not committed."""
        self.current = None

    def reset(self) -> None:
        """The cursor was replaced."""
        self.drop()

    def commit(self) -> DealtStep | None:
        """The current step is committed: moves the cursor. None when there is no such step."""
        dealt, self.current = self.current, None
        if dealt is not None:
            self._advance(dealt)
        return dealt

    @abc.abstractmethod
    def _advance(self, dealt: DealtStep) -> None:
        """Moves the cursor over a committed step."""

    @property
    @abc.abstractmethod
    def ends_epoch(self) -> bool:
        """The current step is known to be the last of its epoch."""

    def acknowledge(self, session: LoaderSession) -> None:  # noqa: B027  # most supplies have nothing to say
        """The loop is left: tells of finished batches that no further lease would tell of. Raises ShoalError when it could not."""


class DealtSupply(Supply):
    """Every rank has its part of every step."""

    leased = False

    def take(self, placement: Placement, session: LoaderSession, loader: str) -> DealtStep | None:
        """See `Supply`. Where a run with another batch size left the cursor, `drop_last` may leave out what remains."""
        self.current = self._dealer.deal(self._course.cursor, placement)
        if self.current is None:
            self._course.end_epoch()
        return self.current

    def following(self, dealt: DealtStep, request: Request) -> Iterator[Request]:
        """See `Supply`."""
        return self._dealer.following(dealt, request)

    @property
    def ends_epoch(self) -> bool:
        """See `Supply`."""
        return self.current is not None and self._after(self.current).epoch > self.current.epoch

    def _advance(self, dealt: DealtStep) -> None:
        self._course.cursor = self._after(dealt)

    def _after(self, dealt: DealtStep) -> Cursor:
        return self._course.cursor.after_step(dealt.positions, self._dealer.plan(dealt.epoch))


class LeasedSupply(Supply):
    """Every batch is a step that one rank has to itself."""

    leased = True

    def __init__(self, dealer: Dealer, course: Course, *, ahead: int) -> None:
        """`ahead`: leases to hold at once."""
        super().__init__(dealer, course)
        self._ahead = ahead
        self._leases: LeasedBatches | None = None

    def take(self, placement: Placement, session: LoaderSession, loader: str) -> DealtStep | None:
        """See `Supply`."""
        epoch = self._course.cursor.epoch
        if self._leases is None or self._leases.epoch != epoch:
            batches = len(self._dealer.plan(epoch))
            self._leases = LeasedBatches(loader=loader, epoch=epoch, batches_in_epoch=batches, ahead=self._ahead)
        number = self._leases.take(session)
        if number is not None:
            self.current = self._dealer.leased(epoch, number, placement)
            return self.current
        if self._leases.done:
            self._course.end_epoch()
        return None

    def following(self, dealt: DealtStep, request: Request) -> Iterator[Request]:
        """See `Supply`."""
        assert self._leases is not None
        return self._dealer.following_leases(dealt, self._leases.coming())

    def reset(self) -> None:
        """See `Supply`. Leases of another epoch than the cursor's are void."""
        super().reset()
        if self._leases is not None and self._leases.epoch != self._course.cursor.epoch:
            self._leases = None

    @property
    def ends_epoch(self) -> bool:
        """See `Supply`. Which batches of the epoch are done is not for one member to know."""
        return False

    def _advance(self, dealt: DealtStep) -> None:
        assert self._leases is not None
        self._leases.finish()
        self._course.cursor = self._course.cursor.after_leased_batch()

    def acknowledge(self, session: LoaderSession) -> None:
        """See `Supply`."""
        if self._leases is not None:
            self._leases.acknowledge(session)
