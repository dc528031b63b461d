"""Pairs evaluation batches with their numbers, so that functions called by `shoal.evaluate` know
which batch they evaluate."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from shoal_worker.elastic.session.evaluation import Batches, StreamedBatches


class _Numbered:
    """Evaluation batches of a dataset, each paired with its number."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.dealing = batches.dealing

    def __len__(self) -> int:
        return len(self._batches)

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, tuple[int, Any]]]:
        """Yields the number of each batch, and the batch paired with that number."""
        return ((number, (number, batch)) for number, batch in self._batches.read(numbers))


class _NumberedStream:
    """Evaluation batches of a stream, each paired with its number."""

    def __init__(self, batches: StreamedBatches) -> None:
        self._batches = batches
        self.dealing = batches.dealing

    @property
    def ended(self) -> str:
        """Sources that this rank has read to the end, in the form described by
        `StreamedBatches`."""
        return self._batches.ended

    def deal(self, held: Collection[int], ended: Iterable[str], rank: int, world_size: int) -> Any:
        """Returns the batches that `rank` must compute, as an argument for `read`."""
        return self._batches.deal(held, ended, rank, world_size)

    def read(self, parts: Any) -> Iterator[tuple[int, tuple[int, Any]]]:
        """Yields the number of each batch, and the batch paired with that number. `parts`: result
        of `deal`."""
        return ((number, (number, batch)) for number, batch in self._batches.read(parts))


def numbered(batches: Batches | StreamedBatches) -> _Numbered | _NumberedStream:
    """Returns batches for `evaluate`, each paired with its number."""
    return _NumberedStream(batches) if isinstance(batches, StreamedBatches) else _Numbered(batches)
