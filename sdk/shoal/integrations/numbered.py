"""Evaluation batches that carry their numbers, for what has to know which batch it is given:
`shoal.evaluate` gives batches alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from shoal_worker.elastic.evaluation import Batches, StreamedBatches


class _Numbered:
    """Evaluation batches, each with its number."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.dealing = batches.dealing

    def __len__(self) -> int:
        return len(self._batches)

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, tuple[int, Any]]]:
        """See `Batches`."""
        return ((number, (number, batch)) for number, batch in self._batches.read(numbers))


class _NumberedStream:
    """The same, of a stream."""

    def __init__(self, batches: StreamedBatches) -> None:
        self._batches = batches
        self.dealing = batches.dealing

    @property
    def ended(self) -> str:
        """See `StreamedBatches`."""
        return self._batches.ended

    def deal(self, held: Collection[int], ended: Iterable[str], rank: int, world_size: int) -> Any:
        """See `StreamedBatches`."""
        return self._batches.deal(held, ended, rank, world_size)

    def read(self, parts: Any) -> Iterator[tuple[int, tuple[int, Any]]]:
        """See `StreamedBatches`."""
        return ((number, (number, batch)) for number, batch in self._batches.read(parts))


def numbered(batches: Batches | StreamedBatches) -> _Numbered | _NumberedStream:
    """The given batches for `evaluate`, each as a pair of its number and itself."""
    return _NumberedStream(batches) if isinstance(batches, StreamedBatches) else _Numbered(batches)
