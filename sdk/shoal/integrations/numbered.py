"""Evaluation batches that carry their numbers, for what has to know which batch it is given: `shoal.evaluate` gives batches alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class _NumberedStream:
    """Evaluation batches, each with its number; how many there are is known at their end."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.dealing = batches.dealing

    @property
    def ended(self) -> str:
        """See `Batches`."""
        return str(getattr(self._batches, "ended", "{}"))

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, tuple[int, Any]]]:
        """See `Batches`."""
        return ((number, (number, batch)) for number, batch in self._batches.read(numbers))


class _Numbered(_NumberedStream):
    """The same, of a known number of batches."""

    def __len__(self) -> int:
        return len(self._batches)


def numbered(batches: Any) -> _NumberedStream:
    """A loader of the given loader's batches for `evaluate`, each as a pair of its number and itself."""
    return _Numbered(batches) if hasattr(type(batches), "__len__") else _NumberedStream(batches)
