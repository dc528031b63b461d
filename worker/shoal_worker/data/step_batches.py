"""Supplies a loader with its next step. A step is either dealt, so that each rank gets a part of
it, or is a batch leased to one member, first come, first served.

This module owns this member's leased batches, and the step that has been dealt to this rank and is
not committed yet. A lease ends when its batch is finished, or when the batch is returned because
the script has left the loop. The module moves the cursor of the `LoaderProgress` when a step
commits, or when an epoch turns out to have no further step. It does not fetch samples. May be used
only on the training thread.
"""

from __future__ import annotations

import abc
import itertools
import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from shoal_common.errors import PreconditionError
from typing_extensions import override

from shoal_worker.data.balance import Balance
from shoal_worker.data.cursor import Cursor, LoaderProgress
from shoal_worker.data.fetch import Request
from shoal_worker.data.sampling import Block, EpochOrders, EpochPlan
from shoal_worker.elastic.contract.loader_interface import Leases, LoaderSession, Placement
from shoal_worker.state.digest import DRAWN

# ------------------------------------------------------------------------ one rank's part of a step
#
# Deals one rank's part of the step at a cursor and determines its batches. The result is a
# `DealtStep`, which lasts until the step commits or aborts. The dealer keeps no state except the
# epoch's order and plan.


@dataclass(kw_only=True)
class DealtStep:
    """A step dealt to this rank. It is valid until the step is committed, or until the next step
    boundary."""

    placement: Placement
    epoch: int
    number: int
    """Number of the step in its epoch, or number of the leased batch."""
    positions: range
    """Positions of the global batch in the epoch's order."""
    blocks: tuple[Block, ...]
    """This rank's blocks of samples."""
    most_blocks: int = 1
    """Largest number of blocks that any rank has in this step."""
    steps_before: int = 0
    """Number of steps that the loader had committed before this one."""
    handed_out: int = 0
    """Number of this rank's samples that the user's loop has received so far."""


def dealt_by(
    plan: EpochPlan, positions: range, cursor: Cursor, placement: Placement, balance: Balance
) -> DealtStep:
    """Deals the step that begins at `cursor` and consists of `positions`. Returns the part that
    belongs to the rank in `placement`."""
    rank, world_size, costs = placement.rank, placement.world_size, balance.costs(placement)
    return DealtStep(
        placement=placement,
        epoch=cursor.epoch,
        number=cursor.step,
        positions=positions,
        blocks=plan.deal(positions, rank, world_size, placement.least_samples, costs),
        most_blocks=plan.most_blocks(positions, world_size, costs),
        steps_before=cursor.global_step,
    )


class Step:
    """One global batch, as yielded by `ElasticDataLoader.steps()`. Iterating over it yields this
    rank's micro-batches, possibly none; without `micro_batch_size`, this rank's single batch. Can
    be iterated only once."""

    def __init__(self, dealt: DealtStep, batches: Iterator[Any]) -> None:
        self.epoch = dealt.epoch
        """Epoch, counted from 0."""
        self.number = dealt.number
        """Number of the step in its epoch, counted from 0."""
        self._length = len(dealt.blocks)
        self._batches: Iterator[Any] | None = batches

    def __len__(self) -> int:
        """Returns the number of this rank's batches."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Iterates over this rank's batches. Raises PreconditionError if the step has already been
        iterated over, because samples would count twice."""
        if self._batches is None:
            raise PreconditionError(
                f"step {self.number} of epoch {self.epoch} was already iterated. Iterate over a "
                "step only once, because its samples would count twice otherwise"
            )
        batches, self._batches = self._batches, None
        return batches


class Dealer:
    """Deals steps. The plan determines the positions of a step, and the order determines which
    samples are at these positions."""

    def __init__(
        self,
        orders: EpochOrders,
        *,
        batch_size: int,
        micro_batch_size: int | None,
        drop_last: bool,
        seed: int,
        balance: Balance,
    ) -> None:
        """`batch_size`: total number of samples in a step or, for leased batches, in one batch."""
        self._orders = orders
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        self._drop_last = drop_last
        self._seed = seed
        self._balance = balance
        self._made: EpochPlan | None = None

    def drawn(self, epoch: int) -> str | None:
        """Returns the digest of the order that a sampler drew for `epoch`; None if there is no
        sampler."""
        return self._orders.digest(epoch)

    def announced_plan(self, epoch: int) -> EpochPlan:
        """Returns the plan of `epoch` from the sampler's announced length, without drawing the
        order."""
        return self._plan(self._orders.length(epoch))

    def plan(self, epoch: int) -> EpochPlan:
        """Returns the plan of `epoch`, drawing the order, because a sampler may draw fewer indices
        than its length."""
        return self._plan(len(self._orders.order(epoch)))

    def deal(self, cursor: Cursor, placement: Placement) -> DealtStep | None:
        """Returns this rank's part of the step at `cursor`; None if the epoch has no further
        step."""
        plan = self.plan(cursor.epoch)
        positions = plan.step(cursor.samples)
        if not positions:
            return None
        return dealt_by(plan, positions, cursor, placement, self._balance)

    def leased(self, epoch: int, number: int, placement: Placement) -> DealtStep:
        """Returns the leased batch `number` of `epoch` as a step of this rank alone."""
        positions = self.plan(epoch).step(number * self._batch_size)
        block = Block(index=0, positions=positions)
        return DealtStep(
            placement=placement, epoch=epoch, number=number, positions=positions, blocks=(block,)
        )

    def request(self, dealt: DealtStep, block: Block) -> Request:
        """Returns the request for a block's batch. If the block has no samples, requests the step's
        first samples as a stand-in, because the rank must take part in collectives."""
        positions = block.positions or dealt.positions[: dealt.placement.least_samples]
        indices = tuple(self._orders.indices(dealt.epoch, positions))
        return Request(
            epoch=dealt.epoch,
            indices=indices,
            key=(self._seed, dealt.epoch, dealt.number, block.index),
        )

    def account(self, dealt: DealtStep, block: Block) -> dict[str, Any]:
        """Implements `Supply.account`."""
        return {
            "samples": self._orders.indices(dealt.epoch, block.positions),
            "expected": self.plan(dealt.epoch).counted,
            "dataset": self._orders.dataset_length,
            "drawn": self._orders.drawn,
        }

    def following(self, dealt: DealtStep, request: Request) -> Iterator[Request]:
        """Yields `request`, and then the requests that this rank will make in the rest of the epoch
        if the ranks do not change."""
        return itertools.dropwhile(lambda planned: planned != request, self._planned(dealt))

    def following_leases(self, dealt: DealtStep, numbers: Iterable[int]) -> Iterator[Request]:
        """Yields the requests for the leased batches with these numbers. If `numbers` is an
        iterator that can yield further items after it has been exhausted, so is the result."""

        def whole(number: int) -> Request:
            step = self.leased(dealt.epoch, number, dealt.placement)
            return self.request(step, step.blocks[0])

        return map(whole, numbers)

    def _planned(self, dealt: DealtStep) -> Iterator[Request]:
        placement = dealt.placement
        at: DealtStep | None = dealt
        cursor = Cursor(epoch=dealt.epoch, samples=dealt.positions.start, step=dealt.number)
        while at is not None:
            yield from (self.request(at, block) for block in at.blocks)
            cursor = Cursor(epoch=cursor.epoch, samples=at.positions.stop, step=cursor.step + 1)
            at = self.deal(cursor, placement)

    def _plan(self, length: int) -> EpochPlan:
        if self._made is None or self._made.length != length:
            self._made = EpochPlan(
                length=length,
                global_batch_size=self._batch_size,
                micro_batch_size=self._micro_batch_size,
                drop_last=self._drop_last,
            )
        return self._made


# ------------------------------------------------------------------------- sources of the next step

_SHORTEST_RETRY_S = 0.01


class LeasedBatches:
    """Leased batches of one epoch. May be used by only one thread."""

    def __init__(self, *, loader: str, epoch: int, batches_in_epoch: int, ahead: int) -> None:
        """`ahead`: number of leases to hold at the same time, so that data workers stay busy."""
        self.epoch = epoch
        self.done = False
        """True if every batch of the epoch is finished, on any member."""
        self._loader = loader
        self._batches_in_epoch = batches_in_epoch
        self._ahead = ahead
        self._held: deque[int] = deque()
        self._announced: deque[int] = deque()
        self._current: int | None = None
        self._finished: list[int] = []

    def take(self, session: LoaderSession) -> int | None:
        """Returns the number of the next batch to train on, which is the previous batch if that is
        not finished. Returns None if no batch is available: either the epoch is `done`, or all
        remaining batches are leased by other members. In the latter case, first waits for the
        interval requested by the coordinator."""
        if self._current is not None:
            return self._current
        want = self._ahead - len(self._held)
        if want > 0 or self._finished:
            answer = self._lease(session, max(0, want))
            if not self._held:
                self.done = answer.epoch_done
                session.wait_for_others(
                    None
                    if self.done
                    else "the batches of the epoch that are leased to other workers"
                )
                if not self.done:
                    time.sleep(max(answer.retry_after_s, _SHORTEST_RETRY_S))
                return None
        session.wait_for_others(None)
        self._current = self._held.popleft()
        return self._current

    @property
    def held(self) -> tuple[int, ...]:
        """Leased batches that come after the batch returned last by `take`, in order."""
        return tuple(self._held)

    def coming(self) -> Iterator[int]:
        """Yields the batch returned last by `take`, then the other leased batches in order. After
        the iterator has been exhausted, it yields further batches if more have been leased
        since."""
        self._announced = deque(self._held)
        if self._current is not None:
            self._announced.appendleft(self._current)
        return _Drain(self._announced)

    def finish(self) -> None:
        """Marks the batch returned last by `take` as finished. The coordinator is notified with the
        next request for a lease."""
        assert self._current is not None
        self._finished.append(self._current)
        self._current = None

    def acknowledge(self, session: LoaderSession) -> None:
        """Reports finished batches to the coordinator when the script leaves the loop, because
        there may be no further request for a lease. Gives up the leases of all other batches,
        except that of the current batch, which may still be finished. In the middle of a round of
        inner steps, gives up the lease of the current batch too."""
        session.wait_for_others(None)
        try:
            if self._lease(session, 0).took_back_at_hand:
                self._current = None
        finally:
            self._held.clear()  # whether or not the coordinator was notified

    def _lease(self, session: LoaderSession, want: int) -> Leases:
        answer = session.lease_batches(
            loader=self._loader,
            epoch=self.epoch,
            batches_in_epoch=self._batches_in_epoch,
            finished=tuple(self._finished),
            want=want,
            at_hand=self._current,
        )
        self._finished.clear()  # only now: reporting them twice is harmless, losing them is not
        self._held += answer.batches
        self._announced += answer.batches
        return answer


class _Drain:
    """Iterator that removes and yields items from a deque. Raises StopIteration whenever the deque
    is empty."""

    def __init__(self, items: deque[int]) -> None:
        self._items = items

    def __iter__(self) -> _Drain:
        return self

    def __next__(self) -> int:
        if not self._items:
            raise StopIteration
        return self._items.popleft()


class Supply(abc.ABC):
    """Deals one step after another. If a step is not committed, the same step is dealt again."""

    leased: ClassVar[bool] = False

    def __init__(self, progress: LoaderProgress) -> None:
        self.current: DealtStep | None = None
        """The step that has been dealt but neither committed nor dropped; None if there is none."""
        self._progress = progress

    @abc.abstractmethod
    def take(self, placement: Placement, session: LoaderSession, loader: str) -> DealtStep | None:
        """Makes the next step the current step and returns it. Returns None if no step is available
        now, or the epoch has ended."""

    @abc.abstractmethod
    def request(self, dealt: DealtStep, block: Block) -> Request:
        """Returns the request for the batch of `block` in the step `dealt`. If the block has no
        samples, requests a stand-in, which is a copy of other samples with weight 0."""

    @abc.abstractmethod
    def following(self, dealt: DealtStep, request: Request) -> Iterator[Request]:
        """Returns `request`, which belongs to the step `dealt`, followed by the requests that will
        probably come next."""

    @abc.abstractmethod
    def upcoming(self, dealt: DealtStep, request: Request) -> Request | None:
        """Returns the request that will probably follow `request` in the epoch; None if there is
        none or it is not known."""

    @abc.abstractmethod
    def account(self, dealt: DealtStep, block: Block) -> dict[str, Any]:
        """Returns the entries for `block` in the sample record (`record.py`): samples, expected,
        dataset, drawn."""

    @abc.abstractmethod
    def plan(self, epoch: int) -> EpochPlan:
        """Returns how `epoch` is divided into steps, as far as this is known without reading the
        data or drawing the order."""

    def dealing(self, epoch: int) -> dict[str, Any]:
        """Returns the values that determine the batches in addition to the loader's arguments. They
        must be the same on all ranks. JSON-able. Returns the same object as long as the values are
        unchanged."""
        return {}

    def limit(self, max_steps: int | None) -> None:
        """Limits the run to `max_steps` steps over all epochs; None: no limit."""
        self._progress.max_steps = max_steps

    def epochs_of(self, max_steps: int) -> int:
        """Returns an upper bound on the number of epochs for `max_steps` steps."""
        return sys.maxsize

    def steps_until(self, epoch: int) -> int | None:
        """Implements `StepSource.steps_until`."""
        progress = self._progress
        steps = self._steps_until(epoch)
        if progress.max_steps is None:
            return steps
        left = max(0, progress.max_steps - progress.cursor.global_step)
        if steps is None:  # this loader's epochs may end earlier
            return left if epoch >= sys.maxsize else None
        return min(steps, left)

    def _steps_until(self, epoch: int) -> int | None:
        """Returns the number of steps until `epoch` begins, disregarding `max_steps`."""
        cursor = self._progress.cursor
        return max(0, (epoch - cursor.epoch) * len(self.plan(cursor.epoch)) - cursor.step)

    def drop(self) -> None:
        """Drops the current step without committing it."""
        self.current = None

    def reset(self) -> None:
        """Drops the current step because a different cursor has been loaded."""
        self.drop()

    def commit(self) -> DealtStep | None:
        """Commits the current step by moving the cursor. Returns the step, or None if there is no
        current step."""
        dealt, self.current = self.current, None
        if dealt is not None:
            self._advance(dealt)
        return dealt

    @abc.abstractmethod
    def _advance(self, dealt: DealtStep) -> None:
        """Moves the cursor past a committed step."""

    @property
    @abc.abstractmethod
    def ends_epoch(self) -> bool:
        """True if the current step is known to be the last of its epoch."""

    def rest(self) -> None:  # noqa: B027  # most supplies read nothing
        """Stops reading ahead. Must be called when the script leaves the loop."""

    def acknowledge(self, session: LoaderSession) -> None:  # noqa: B027
        # most supplies have nothing to report
        """Reports finished leased batches when the script leaves the loop, because there may be no
        further request for a lease. Raises ShoalError if the report fails."""

    def capture(self) -> dict[str, Any]:
        """Returns the loader's state except the cursor. JSON-able."""
        return {}

    def load(self, state: Mapping[str, Any], *, loader: str) -> None:  # noqa: B027
        # most supplies have no state in addition to the cursor
        """Loads the result of `capture`. The caller must have checked the cursor in `state`, and
        must load it afterwards. If this method raises CorruptDataError or ConfigurationError,
        nothing has changed."""


class IndexedSupply(Supply):
    """Supply of steps from a dataset with samples that can be accessed by index."""

    def __init__(self, dealer: Dealer, progress: LoaderProgress) -> None:
        super().__init__(progress)
        self._dealer = dealer
        self._described: tuple[int, dict[str, Any]] | None = None

    @override
    def request(self, dealt: DealtStep, block: Block) -> Request:
        return self._dealer.request(dealt, block)

    @override
    def account(self, dealt: DealtStep, block: Block) -> dict[str, Any]:
        return self._dealer.account(dealt, block)

    @override
    def plan(self, epoch: int) -> EpochPlan:
        return self._dealer.announced_plan(epoch)

    @override
    def dealing(self, epoch: int) -> dict[str, Any]:
        if self._described is None or self._described[0] != epoch:
            self._described = epoch, {DRAWN: self._dealer.drawn(epoch)}
        return self._described[1]


class DealtSupply(IndexedSupply):
    """Supply that deals every rank its part of every step."""

    def take(self, placement: Placement, session: LoaderSession, loader: str) -> DealtStep | None:
        """Implements `Supply.take`. If the run had a different batch size before, `drop_last` may
        omit all samples after the cursor."""
        self.current = self._dealer.deal(self._progress.cursor, placement)
        if self.current is None:
            self._progress.end_epoch()
        return self.current

    @override
    def following(self, dealt: DealtStep, request: Request) -> Iterator[Request]:
        return self._dealer.following(dealt, request)

    @override
    def upcoming(self, dealt: DealtStep, request: Request) -> Request | None:
        return next(itertools.islice(self.following(dealt, request), 1, None), None)

    @property
    @override
    def ends_epoch(self) -> bool:
        return self.current is not None and self._after(self.current).epoch > self.current.epoch

    def _advance(self, dealt: DealtStep) -> None:
        self._progress.cursor = self._after(dealt)

    def _after(self, dealt: DealtStep) -> Cursor:
        return self._progress.cursor.after_step(dealt.positions, self._dealer.plan(dealt.epoch))


class LeasedSupply(IndexedSupply):
    """Supply of leased batches. Every batch is a step of one rank alone."""

    leased = True

    def __init__(self, dealer: Dealer, progress: LoaderProgress, *, ahead: int) -> None:
        """`ahead`: number of leases to hold at the same time."""
        super().__init__(dealer, progress)
        self._ahead = ahead
        self._leases: LeasedBatches | None = None
        self._max_steps: int | None = None

    @override
    def limit(self, max_steps: int | None) -> None:
        # No member knows the steps of all members, so the last epoch is shortened instead.
        self._max_steps = max_steps

    @override
    def epochs_of(self, max_steps: int) -> int:
        return math.ceil(max_steps / len(self.plan(0)))

    @override
    def _steps_until(self, epoch: int) -> int | None:
        steps = super()._steps_until(epoch)
        if steps is None or self._max_steps is None:
            return steps
        before = self._progress.cursor.epoch * len(self.plan(0))
        return min(steps, max(0, self._max_steps - before))

    @override
    def take(self, placement: Placement, session: LoaderSession, loader: str) -> DealtStep | None:
        epoch = self._progress.cursor.epoch
        if self._leases is None or self._leases.epoch != epoch:
            batches = len(self._dealer.plan(epoch))
            if self._max_steps is not None:
                batches = min(batches, self._max_steps - epoch * len(self.plan(0)))
            self._leases = LeasedBatches(
                loader=loader, epoch=epoch, batches_in_epoch=batches, ahead=self._ahead
            )
        number = self._leases.take(session)
        if number is not None:
            self.current = self._dealer.leased(epoch, number, placement)
            return self.current
        if self._leases.done:
            self._progress.end_epoch()
        return None

    @override
    def following(self, dealt: DealtStep, request: Request) -> Iterator[Request]:
        assert self._leases is not None
        return self._dealer.following_leases(dealt, self._leases.coming())

    @override
    def upcoming(self, dealt: DealtStep, request: Request) -> Request | None:
        assert self._leases is not None
        return next(self._dealer.following_leases(dealt, self._leases.held), None)

    def reset(self) -> None:
        """Implements `Supply.reset`. Drops leases that do not belong to the new cursor's epoch."""
        super().reset()
        if self._leases is not None and self._leases.epoch != self._progress.cursor.epoch:
            self._leases = None

    @property
    def ends_epoch(self) -> bool:
        """False, because no single member knows which batches of the epoch are finished."""
        return False

    def _advance(self, dealt: DealtStep) -> None:
        assert self._leases is not None
        self._leases.finish()
        self._progress.finish_leased_batch()

    @override
    def acknowledge(self, session: LoaderSession) -> None:
        if self._leases is not None:
            self._leases.acknowledge(session)
