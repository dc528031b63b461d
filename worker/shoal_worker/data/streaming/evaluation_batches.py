"""Deals the batches of a stream to ranks for evaluation. The number of batches is known only at the
end of the stream.

A batch belongs to one source: the stream, or a shard of a `ShardedStream`. If there are at least as
many sources as ranks, each source is read by one rank. Otherwise several ranks read the same
source, and each computes part of its batches. A batch is the same on every rank, and its number
consists of its source and its index in the source. Batches that were computed before a fault
therefore need not be computed again.
"""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from shoal_worker.data.fetch import seed, seeded
from shoal_worker.data.streaming.reader import Mark, Reader
from shoal_worker.data.streaming.sources import Sources

_SHIFT: Final = 32
"""Number of low bits of a batch's number that contain its index in the source. The bits above them
contain the number of the source."""
_FIRST: Final = -1
"""Key under which a rank's report (`ended`) contains the first item of the first source. The other
keys of a report are the numbers of the sources that the rank has read to the end."""


class Part(NamedTuple):
    """A rank's part of one source. The batches of the source that have not been computed yet are
    counted from 0; the part consists of those whose count modulo `sharing` equals `place`."""

    source: int
    place: int
    sharing: int
    held: Collection[int]
    """Numbers of batches that have already been computed."""
    first_only: bool = False
    """True if the rank reads only the first item, for comparison with the other ranks."""


class StreamedEvaluation:
    """Batches of a stream, for evaluation. May be used by only one thread at a time."""

    def __init__(
        self,
        sources: Callable[[], Sources],
        names: Sequence[str],
        *,
        collate_fn: Callable[[list[Any]], Any],
        size: int,
        seed: int,
        dealing: str,
    ) -> None:
        """Prepares the batches without reading anything yet.

        `sources`: function that opens the stream's sources. `names`: names of the sources in error
        messages. `size`: number of items in a batch. `dealing`: values that determine the batches;
        the same on all ranks.
        """
        self._sources = sources
        self._names = names
        self._collate = collate_fn
        self._size = size
        self._seed = seed
        self.dealing = dealing
        self._ends: dict[int, tuple[int, int]] = {}
        """Number of items, and fingerprint of all items, of each source that has been read to the
        end."""
        self._first: int | None = None
        """Fingerprint of the first source's first item, if it is compared across ranks; otherwise
        None."""

    @property
    def ended(self) -> str:
        """Implements `elastic.evaluation.Batches.ended`."""
        ends = sorted(self._ends.items())
        counts = {
            str(source): [items, f"{self._names[source]}: {items} items, {read:012x}"]
            for source, (items, read) in ends
        }
        if self._first is not None:
            counts[str(_FIRST)] = [1, f"{self._names[0]} begins with {self._first:012x}"]
        return json.dumps(counts)

    def anew(self) -> StreamedEvaluation:
        """Returns a new object for the same batches that has not read anything yet."""
        other = copy.copy(self)
        other._ends, other._first = {}, None
        return other

    def deal(
        self, held: Collection[int], ended: Iterable[str], rank: int, world_size: int
    ) -> list[Part]:
        """Returns the parts that `rank` computes, as arguments for `read`. `held`: numbers of the
        batches that any rank has already computed. `ended`: each rank's report of the sources that
        it has read to the end (its `ended`).

        If there are several sources, all ranks also read the first item of the first source, to
        detect a `read` function that depends on the rank.
        """
        ends = {
            int(source): items for each in ended for source, (items, _) in json.loads(each).items()
        }
        left = [
            source
            for source in range(len(self._names))
            if source not in ends or not self._is_whole(source, ends[source], held)
        ]
        if not left:
            return []
        compared = (
            [Part(0, 0, 1, held, first_only=True)]
            if len(self._names) > 1 and world_size > 1
            else []
        )
        if len(left) >= world_size:
            return compared + [Part(source, 0, 1, held) for source in left[rank::world_size]]
        at = rank % len(left)
        return [
            *compared,
            Part(left[at], rank // len(left), len(range(at, world_size, len(left))), held),
        ]

    def __iter__(self) -> Iterator[Any]:
        """Iterates over all batches of the stream from its first item."""
        return (batch for _, batch in self.read(self.deal((), (), 0, 1)))

    def read(self, parts: Iterable[Part]) -> Iterator[tuple[int, Any]]:
        """Yields (number, batch) for all batches in `parts`; numbers ascend within each part."""
        coming = iter(parts)
        opened: deque[tuple[Part, Reader]] = deque()
        sources = self._sources()
        try:
            while True:
                while len(opened) < sources.at_once and (part := next(coming, None)) is not None:
                    opened.append((part, self._open(sources, part.source)))
                if not opened:
                    return
                yield from self._batches(*opened[0])
                opened.popleft()[1].close()
        finally:
            for _, reader in opened:
                reader.close()
            sources.close()

    def _open(self, sources: Sources, source: int) -> Reader:
        with seeded((self._seed, 0, source)):
            reader = sources.open(
                source, key=(self._seed, 0, source), name=self._names[source], at=Mark()
            )
        reader.expect(self._size + 1)
        return reader

    def _batches(self, part: Part, reader: Reader) -> Iterator[tuple[int, Any]]:
        if part.first_only:
            with seeded((self._seed, 0, part.source)):
                reader.fill(1)
            self._first = reader.mark(min(1, reader.stop)).fingerprint
            return
        missing = 0
        for place in range(1 << _SHIFT):
            number, start, batch = (part.source << _SHIFT) + place, place * self._size, None
            wanted = number not in part.held and missing % part.sharing == part.place
            missing += number not in part.held
            key = (self._seed, 0, part.source, place)
            with seeded(key):
                # one item more, so that a worker knows how far it may read ahead
                reader.fill(start + self._size + 1)
                stop = min(start + self._size, reader.stop)
                if wanted and stop > start:
                    items = reader.items(range(start, stop))
                    seed(key)
                    batch = self._collate(items)
            if stop > start and wanted:
                yield number, batch
            if reader.end is not None and stop == reader.end:
                self._ends[part.source] = reader.end, reader.mark(reader.end).fingerprint
                return
            reader.drop(stop)

    def _is_whole(self, source: int, items: int, held: Collection[int]) -> bool:
        return all((source << _SHIFT) + place in held for place in range(-(-items // self._size)))
