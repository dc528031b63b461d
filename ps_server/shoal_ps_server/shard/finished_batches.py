"""Records which leased batches are finished, so that a batch that is leased again after a member's
death is not applied twice.

With each push, a member reports the batches that it has finished since its last push. The batch
that a member is working on, or was working on when it died, is recorded by each partition
(partition.py). Consecutive batches have consecutive keys, so the finished batches of an epoch merge
into one range of keys. Belongs to the thread that owns the shard.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable
from typing import Final

MOST_RUNS: Final = 1 << 16
"""Maximum number of ranges that are kept; the oldest are forgotten. There is about one range per
group of consecutive unfinished batches."""


class Batches:
    """Set of the keys of finished batches, stored as ranges of consecutive keys."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        """`runs`: first key and end (exclusive) of each range, oldest first."""
        self._ends = dict(runs)
        """First key -> end (exclusive) of each range, oldest first."""
        self._firsts = sorted(self._ends)

    def add(self, keys: Iterable[int]) -> None:
        """Adds the keys of finished batches."""
        for key in keys:
            if key and key not in self:
                self._add(key)

    def add_runs(self, runs: Iterable[tuple[int, int]]) -> None:
        """Adds ranges of keys known to another server, each given as first key and end
        (exclusive)."""
        for first, end in runs:
            place = bisect_right(self._firsts, end)
            while place and self._ends[self._firsts[place - 1]] >= first:
                # the ranges overlap or are adjacent
                place -= 1
                known = self._firsts.pop(place)
                first, end = min(first, known), max(end, self._ends.pop(known))
            insort(self._firsts, first)
            self._ends[first] = end
            self._forget_oldest()

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, int)
        place = bisect_right(self._firsts, key) - 1
        return place >= 0 and key < self._ends[self._firsts[place]]

    def runs(self) -> list[tuple[int, int]]:
        """Returns the first key and the end (exclusive) of each range, oldest first."""
        return list(self._ends.items())

    def _add(self, key: int) -> None:
        place = bisect_right(self._firsts, key)
        first, end = key, key + 1
        if place and self._ends[self._firsts[place - 1]] == key:
            first = self._firsts[place - 1]
        following = self._firsts[place] if place < len(self._firsts) else None
        if following == end:
            end = self._ends.pop(following)
            del self._firsts[place]
        if first == key:
            insort(self._firsts, key)
        self._ends[first] = end
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        if len(self._ends) > MOST_RUNS:
            oldest = next(iter(self._ends))
            del self._ends[oldest]
            self._firsts.remove(oldest)
