"""Which leased batches were pushed to the end, so that one which is dealt again after a member's
death is not applied twice.

A member says with each push which batches it has finished since the last. The batch that it is at,
or died in, each partition knows by itself (partition.py). Keys of batches that follow one another
do so too, so what is finished of an epoch grows together to one run of keys. Belongs to the thread
that owns the shard.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable
from typing import Final

MOST_RUNS: Final = 1 << 16
"""How many runs are kept; then the oldest are forgotten. There is about one for each block of
batches that somebody is at."""


class Batches:
    """Keys, as runs of those that follow one another."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        """`runs`: first key and end of each, the oldest first."""
        self._ends = dict(runs)
        """First key -> end, the oldest first."""
        self._firsts = sorted(self._ends)

    def add(self, keys: Iterable[int]) -> None:
        """Notes these keys as those of finished batches."""
        for key in keys:
            if key and key not in self:
                self._add(key)

    def add_runs(self, runs: Iterable[tuple[int, int]]) -> None:
        """Notes runs of keys, first key and end of each, as another server knows them."""
        for first, end in runs:
            place = bisect_right(self._firsts, end)
            while place and self._ends[self._firsts[place - 1]] >= first:  # it overlaps, or touches
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
        """First key and end of each, the oldest first."""
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
