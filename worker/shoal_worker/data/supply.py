"""Where a loader's next step comes from: dealt to the rank by its place in the world, or leased first come first served.

Owns the step that this rank was dealt and that is not committed yet, and the leases. Moves the cursor of the `Course` when a step commits,
or when an epoch turns out to have none left. It fetches nothing. Used by the training thread alone.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import ClassVar

from shoal_worker.data.course import Course
from shoal_worker.data.cursor import Cursor
from shoal_worker.data.dealer import Dealer
from shoal_worker.data.fetch import Request
from shoal_worker.data.leases import LeasedBatches
from shoal_worker.data.step import DealtStep
from shoal_worker.elastic.contract import Placement, StepClock


class Supply(abc.ABC):
    """Deals one step after the other; the same one again until it is committed."""

    leased: ClassVar[bool]

    def __init__(self, dealer: Dealer, course: Course) -> None:
        self.current: DealtStep | None = None
        """Dealt, and neither committed nor dropped."""
        self._dealer = dealer
        self._course = course

    @abc.abstractmethod
    def take(self, placement: Placement, clock: StepClock, loader: str) -> DealtStep | None:
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

    def acknowledge(self, clock: StepClock) -> None:  # noqa: B027  # most supplies have nothing to say
        """The loop is left: tells of finished batches that no further lease would tell of. Raises ShoalError when it could not."""


class DealtSupply(Supply):
    """Every rank has its part of every step."""

    leased = False

    def take(self, placement: Placement, clock: StepClock, loader: str) -> DealtStep | None:
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

    def take(self, placement: Placement, clock: StepClock, loader: str) -> DealtStep | None:
        """See `Supply`."""
        epoch = self._course.cursor.epoch
        if self._leases is None or self._leases.epoch != epoch:
            batches = len(self._dealer.plan(epoch))
            self._leases = LeasedBatches(loader=loader, epoch=epoch, batches_in_epoch=batches, ahead=self._ahead)
        number = self._leases.take(clock)
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

    def acknowledge(self, clock: StepClock) -> None:
        """See `Supply`."""
        if self._leases is not None:
            self._leases.acknowledge(clock)
