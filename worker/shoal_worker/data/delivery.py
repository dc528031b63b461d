"""Hands the batches of a dealt step to the user's loop: fetches and weighs each, tells the session of it, and records it.

What a batch weighs in the mean over a step is its samples, or what the user's `weight_fn` says; so do the parts that a pipeline cuts it
into.

Owns nothing of the run: what was handed out is noted in the `DealtStep`. Used by the training thread alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from torch.utils import _pytree as pytree

from shoal_worker.data.dealer import Dealer, DealtStep, Step
from shoal_worker.data.fetch import Fetcher, Request
from shoal_worker.data.orders import EpochOrders
from shoal_worker.data.plan import Block
from shoal_worker.data.record import SampleRecord
from shoal_worker.data.supply import Supply
from shoal_worker.elastic.loader_interface import LoaderSession, Share, WeighRows

WeightFn = Callable[[Any], float]


def weight_of(batch: Any, weight_fn: WeightFn) -> float:
    """What `weight_fn` says. Raises ConfigurationError: that is no weight."""
    weight = float(weight_fn(batch))
    if not math.isfinite(weight) or weight < 0:
        raise ConfigurationError(f"weight_fn gave {weight}; expected a finite number of at least 0")
    return weight


def weights_of_rows(batch: Any, weight_fn: WeightFn, rows: Sequence[int]) -> list[float]:
    """What parts of a batch weigh, of so many rows each.

    Raises:
        ConfigurationError: the batch cannot be cut so, or the parts do not weigh together what the whole does.
    """
    leaves, structure = pytree.tree_flatten(batch)
    cut = [one for one in leaves if isinstance(one, torch.Tensor) and one.dim() > 0]
    lengths = {len(one) for one in cut}
    if lengths != {sum(rows)}:
        raise ConfigurationError(
            f"train_step was given {sum(rows)} rows of a batch whose tensors have {sorted(lengths)}: with weight_fn= a pipeline weighs the "
            "same rows of the loader's batch as it trains on; pass the batch as the loader gave it, or leave weight_fn out"
        )
    parts = [one.split(list(rows)) if isinstance(one, torch.Tensor) and one.dim() > 0 else [one] * len(rows) for one in leaves]
    weights = [weight_of(pytree.tree_unflatten([part[index] for part in parts], structure), weight_fn) for index in range(len(rows))]
    whole = weight_of(batch, weight_fn)
    if not math.isclose(sum(weights), whole, rel_tol=1e-4):
        raise ConfigurationError(
            f"weight_fn gave {whole} for a batch, and {sum(weights)} for its {len(rows)} micro-batches together: a pipeline needs weights "
            "that add up, such as numbers of samples or tokens, counted in tensors with a row for each sample"
        )
    return weights


class Delivery:
    """Hands the batches of one loader's steps to the user's loop."""

    def __init__(
        self,
        supply: Supply,
        dealer: Dealer,
        orders: EpochOrders,
        fetcher: Fetcher,
        *,
        in_micro_batches: bool,
        weight_fn: Callable[[Any], float] | None,
        record: SampleRecord | None,
    ) -> None:
        self.failed = False
        """Making a batch raised an error. Whoever begins an iteration sets it back."""
        self._supply = supply
        self._dealer = dealer
        self._orders = orders
        self._fetcher = fetcher
        self._in_micro_batches = in_micro_batches
        self._weight_fn = weight_fn
        self._record = record

    def step(self, dealt: DealtStep, session: LoaderSession, loader: str) -> Step:
        """The step for the user's loop. With micro-batches the session hears the share here, else with the batch, which may weigh it."""
        if self._in_micro_batches:
            weighed = self._weight_fn is not None
            weight = math.nan if weighed else float(sum(map(len, dealt.blocks)))
            total = None if weighed else float(len(dealt.positions))
            most = len(self._dealer.plan(dealt.epoch).deal(dealt.positions, 0, dealt.placement.world_size))
            session.assign(Share(weight=weight, total_weight=total, micro_batches=len(dealt.blocks), most_micro_batches=most))
        return Step(dealt, self._hand_out(dealt, session, loader))

    def _hand_out(self, dealt: DealtStep, session: LoaderSession, loader: str) -> Iterator[Any]:
        for block in dealt.blocks:
            if self._supply.current is not dealt:
                raise PreconditionError(f"step {dealt.number} of epoch {dealt.epoch} is over; its batches can no longer be taken")
            request = self._dealer.request(dealt, block)
            try:
                batch = self._fetcher.fetch(request, functools.partial(self._supply.following, dealt, request))
            except Exception:  # whatever it is: it is raised again
                self.failed = True
                raise
            weight = self._weight(batch, block)
            if not self._in_micro_batches:
                session.assign(Share(weight=weight, total_weight=self._total_weight(dealt, weight), micro_batches=None))
            session.begin_micro_batch(index=block.index, weight=weight, key=request.key, weigh=self._weigh_rows(batch, block))
            self._note(dealt, block, request, loader)
            dealt.handed_out += len(block)
            yield batch
            session.end_micro_batch()
        if self._in_micro_batches:
            session.finish_batches()

    def _weight(self, batch: Any, block: Block) -> float:
        if self._weight_fn is None or not len(block):
            return float(len(block))
        return weight_of(batch, self._weight_fn)

    def _weigh_rows(self, batch: Any, block: Block) -> WeighRows | None:
        if self._weight_fn is None or not len(block):
            return None
        return functools.partial(weights_of_rows, batch, self._weight_fn)

    def _total_weight(self, dealt: DealtStep, weight: float) -> float | None:
        if self._supply.leased:
            return weight
        return None if self._weight_fn is not None else float(len(dealt.positions))

    def _note(self, dealt: DealtStep, block: Block, request: Request, loader: str) -> None:
        if self._record is None or not dealt.placement.leads_replica:
            return
        self._record.write(
            "dealt",
            loader=loader,
            generation=dealt.placement.generation,
            epoch=dealt.epoch,
            step=dealt.number,
            rank=dealt.placement.rank,
            index=block.index,
            begin=dealt.positions.start,
            first=block.positions.start,
            samples=list(request.indices) if len(block) else [],
            expected=self._dealer.plan(dealt.epoch).counted,
            dataset=self._orders.dataset_length,
            drawn=self._orders.drawn,
        )
