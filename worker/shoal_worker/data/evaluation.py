"""The batches of an evaluation loader: a fixed list of pieces of work that any rank can do, so that `evaluate` can deal them.

There are no steps here, no cursor and no commits. Every sample is in exactly one batch, in the dataset's order (or that of the sampler's one
draw).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shoal_worker.data.fetch import Fetcher, Request
from shoal_worker.data.orders import EpochOrders
from shoal_worker.data.plan import EpochPlan


class EvaluationBatches:
    """Used by one thread at a time."""

    def __init__(self, *, orders: EpochOrders, inline: Fetcher, ahead: Fetcher, seed: int) -> None:
        """`inline` makes single batches, `ahead` streams of them (with the data workers, if there are any)."""
        self._orders = orders
        self._inline = inline
        self._ahead = ahead
        self._seed = seed

    def all(self, plan: EpochPlan) -> list[range]:
        """The positions of every batch, in order: micro-batches where the plan has them, else whole batches."""
        size = plan.micro_batch_size or plan.global_batch_size
        return [range(start, min(start + size, plan.length)) for start in range(0, plan.length, size)]

    def fetch(self, positions: range) -> Any:
        """One batch, made here and now."""
        request = self._request(positions)
        return self._inline.fetch(request, lambda: iter([request]))

    def stream(self, batches: Sequence[range]) -> Iterator[Any]:
        """These batches, in this order, made ahead by the data workers."""
        requests = [self._request(positions) for positions in batches]
        try:
            for index, request in enumerate(requests):
                yield self._ahead.fetch(request, lambda index=index: iter(requests[index:]))  # type: ignore[misc]
        finally:
            self._ahead.close()

    def _request(self, positions: range) -> Request:
        return Request(epoch=0, indices=tuple(self._orders.indices(0, positions)), key=(self._seed, 0, 0, positions.start))
