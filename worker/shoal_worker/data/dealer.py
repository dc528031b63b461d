"""Deals the step at a cursor to one rank, and says which batches that means: a `DealtStep`, which lasts until it commits or is lost.

The dealer keeps no state but the epoch's order and plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shoal_common.errors import PreconditionError

from shoal_worker.data.cursor import Cursor
from shoal_worker.data.fetch import Request
from shoal_worker.data.orders import EpochOrders
from shoal_worker.data.plan import Block, EpochPlan
from shoal_worker.elastic.loader_interface import Placement


@dataclass(kw_only=True)
class DealtStep:
    """What this rank was dealt. Forgotten when the step commits or the next border begins."""

    placement: Placement
    epoch: int
    number: int
    """Number of the step in its epoch, or of the leased batch."""
    positions: range
    """Positions of the whole global batch in the epoch's order."""
    blocks: tuple[Block, ...]
    """The blocks of samples that are this rank's."""
    handed_out: int = 0
    """Samples of this rank that the user's loop has got."""


class Step:
    """One global batch, as `ElasticDataLoader.steps()` gives it. Iterate it once: it yields this rank's micro-batches, perhaps none;
    without `micro_batch_size`, the one batch of this rank."""

    def __init__(self, dealt: DealtStep, batches: Iterator[Any]) -> None:
        self.epoch = dealt.epoch
        """0-based."""
        self.number = dealt.number
        """0-based within the epoch."""
        self._length = len(dealt.blocks)
        self._batches: Iterator[Any] | None = batches

    def __len__(self) -> int:
        """How many batches this rank gets."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Raises PreconditionError when called a second time: the samples would count twice."""
        if self._batches is None:
            raise PreconditionError(
                f"step {self.number} of epoch {self.epoch} was iterated before; a step hands out its batches once, "
                "so that no sample counts twice"
            )
        batches, self._batches = self._batches, None
        return batches


class Dealer:
    """Joins the orders (which samples) with the plan (which positions)."""

    def __init__(self, orders: EpochOrders, *, batch_size: int, micro_batch_size: int | None, drop_last: bool, seed: int) -> None:
        """`batch_size`: samples in a step over all ranks or, where batches are leased, in one of those."""
        self._orders = orders
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        self._drop_last = drop_last
        self._seed = seed
        self._made: EpochPlan | None = None

    def announced_plan(self, epoch: int) -> EpochPlan:
        """The plan of `epoch` by the length that the sampler tells, without drawing it."""
        return self._plan(self._orders.length(epoch))

    def plan(self, epoch: int) -> EpochPlan:
        """The plan of `epoch` by its order: a sampler may draw fewer than its length says."""
        return self._plan(len(self._orders.order(epoch)))

    def deal(self, cursor: Cursor, placement: Placement) -> DealtStep | None:
        """This rank's part of the step at `cursor`; None when the epoch has no further one."""
        plan = self.plan(cursor.epoch)
        positions = plan.step(cursor.samples)
        if not positions:
            return None
        blocks = plan.deal(positions, placement.rank, placement.world_size)
        return DealtStep(placement=placement, epoch=cursor.epoch, number=cursor.step, positions=positions, blocks=blocks)

    def leased(self, epoch: int, number: int, placement: Placement) -> DealtStep:
        """Batch `number` of `epoch` as a step that this rank has to itself."""
        positions = self.plan(epoch).step(number * self._batch_size)
        block = Block(index=0, positions=positions)
        return DealtStep(placement=placement, epoch=epoch, number=number, positions=positions, blocks=(block,))

    def request(self, dealt: DealtStep, block: Block) -> Request:
        """The batch that `block` means. A rank without samples in the step gets the step's first one: it must take part in collectives."""
        positions = block.positions or dealt.positions[:1]
        indices = tuple(self._orders.indices(dealt.epoch, positions))
        return Request(epoch=dealt.epoch, indices=indices, key=(self._seed, dealt.epoch, dealt.number, block.index))

    def following(self, dealt: DealtStep, request: Request) -> Iterator[Request]:
        """`request` and all that its rank will need after it in the epoch, if the ranks stay as they are."""
        return itertools.dropwhile(lambda planned: planned != request, self._planned(dealt))

    def following_leases(self, dealt: DealtStep, numbers: Iterable[int]) -> Iterator[Request]:
        """The batches of `numbers`. Like `numbers`, it may go on after it has run dry."""

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
                length=length, global_batch_size=self._batch_size, micro_batch_size=self._micro_batch_size, drop_last=self._drop_last
            )
        return self._made
