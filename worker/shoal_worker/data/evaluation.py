"""The batches of an evaluation loader: a fixed list of pieces of work that any rank can do, so that `evaluate` can deal them.

There are no steps here, no cursor and no commits. Every sample is in exactly one batch, in the dataset's order, or that of the sampler's
one draw. A batch has a number, and is the same whoever makes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from shoal_worker.data.fetch import Fetcher, Request
from shoal_worker.data.orders import EpochOrders


class EvaluationBatches:
    """Batches by number. Used by one thread at a time."""

    def __init__(self, *, orders: EpochOrders, fetcher: Fetcher, size: int, seed: int, dealing: str) -> None:
        """`dealing`: what the batches follow from, the same on all ranks."""
        self.dealing = dealing
        self._orders = orders
        self._fetcher = fetcher
        self._length = len(orders.order(0))  # a sampler may draw fewer, or more, than its length says
        self._size = size
        self._seed = seed

    def __len__(self) -> int:
        """How many there are."""
        return math.ceil(self._length / self._size)

    def __iter__(self) -> Iterator[Any]:
        """All of them."""
        return (batch for _, batch in self.read(range(len(self))))

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """(number, batch) for these numbers, in this order. Data workers make them ahead."""
        wanted = [(number, self._request(number)) for number in numbers]
        try:
            for place, (number, request) in enumerate(wanted):
                yield number, self._fetcher.fetch(request, lambda place=place: (later for _, later in wanted[place:]))  # type: ignore[misc]
        finally:
            self._fetcher.close()

    def samples(self, number: int) -> int:
        """In the batch of this number."""
        return min(self._size, self._length - number * self._size)

    def _request(self, number: int) -> Request:
        start = number * self._size
        positions = range(start, min(start + self._size, self._length))
        return Request(epoch=0, indices=tuple(self._orders.indices(0, positions)), key=(self._seed, 0, 0, start))
