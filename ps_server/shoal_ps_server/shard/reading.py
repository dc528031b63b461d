"""Reads a partition piece by piece while it may change, with copy-on-write.

A reading returns the values as they were when it was opened. Until the partition changes, it uses
the live values. Before a push is applied, the values are copied once for all unfinished readings. A
pull therefore normally needs neither a copy nor a lock, and a slow reader does not delay other
callers. If slow readers would need too many copies, the oldest readings are aborted.

Readings of compressed values use a copy from the beginning. All concurrent readers of a version
share it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import torch
from shoal_common.errors import UnavailableError

from shoal_ps_server.shard.payload import bytes_of

MOST_COPIES_BYTES: Final = 256 << 20
"""Maximum total size in bytes of the copies that a server keeps for readers."""
RETRY_AFTER: Final = timedelta(seconds=1)
"""Suggested delay before a reader whose reading was aborted reads again. Other readers may have
finished by then."""


class Reading:
    """The values of one partition as seen by one reader, and how many of their bytes it has read.
    Belongs to the thread that owns the shard."""

    def __init__(
        self, values: torch.Tensor, *, version: int, encoded: EncodedValues | None = None
    ) -> None:
        """`encoded`: owner of the compressed `values`; None if they are the partition's own
        values."""
        self.version = version
        self._encoded = encoded
        self._rest = bytes_of(values)
        self._given_up = False
        self._promised = 0

    def take(self, nbytes: int) -> memoryview:
        """Returns the next bytes, at most `nbytes`; empty at the end. The result is a view of
        memory that may change: copy it before the shard changes.

        Raises UnavailableError / PULL_TOO_SLOW if the reading has been aborted.
        """
        self._check_held()
        piece, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        self._promised = max(0, self._promised - nbytes)
        return piece

    def promise(self, nbytes: int) -> None:
        """Reserves bytes whose number has already been announced to the reader. They can be taken
        even if the reading is aborted after this call. Raises the errors of `take`."""
        self._check_held()
        self._promised = nbytes

    def _check_held(self) -> None:
        if self._given_up and not self._promised:
            raise UnavailableError(
                "the values were read too slowly, and copies for readers already take "
                f"{MOST_COPIES_BYTES >> 20} MiB; pull again",
                reason="PULL_TOO_SLOW",
                retry_after=RETRY_AFTER,
            )

    @property
    def rest(self) -> memoryview:
        """All unread bytes. Like the results of `take`, they must be copied before the shard
        changes."""
        return self._rest

    @property
    def remaining(self) -> int:
        """Number of unread bytes."""
        return self._rest.nbytes

    def detach(self, copy: memoryview) -> None:
        """Continues the reading in `copy`, a complete copy of the values, because they are about to
        change."""
        self._rest = copy[copy.nbytes - self._rest.nbytes :]

    def give_up(self) -> None:
        """Aborts the reading. The next `take` raises an error, unless the bytes were promised."""
        self._given_up = True
        # leaves at least one byte to read, so that the reader gets the error
        self._rest = memoryview(bytes(self._rest[: self._promised]) + b"\0")


@dataclass(eq=False)
class EncodedValues:
    """The compressed values of one version of a partition. The object exists only as long as a
    reader uses it."""

    payload: torch.Tensor
    """Compressed values as uint8."""
    readers: weakref.WeakSet[Reading] = field(default_factory=weakref.WeakSet)

    def read(self, copies: Copies, *, version: int) -> Reading:
        """Returns a `Reading` of the compressed values for a new reader. `copies`: accounts for the
        memory of the values until all readers have finished. `version`: version of the values."""
        copies.keep(self.payload.nbytes, self.readers)
        reading = Reading(self.payload, version=version, encoded=self)
        self.readers.add(reading)
        return reading


class Copies:
    """A server's memory for readers in addition to the live values: copies of values that have
    changed, and compressed values."""

    def __init__(self, *, limit: int = MOST_COPIES_BYTES) -> None:
        self._limit = limit
        self._copies: deque[tuple[int, weakref.WeakSet[Reading]]] = deque()
        """Size in bytes and readers of each copy, oldest first."""

    def detach(self, values: torch.Tensor, readings: Iterable[Reading]) -> None:
        """Makes unfinished readings of `values` continue in a copy. Must be called before the
        values change."""
        unread = weakref.WeakSet(reading for reading in readings if reading.remaining)
        if not unread:
            return
        self.keep(values.nbytes, unread)
        copy = memoryview(bytes(bytes_of(values)))
        for reading in unread:
            reading.detach(copy)

    def keep(self, nbytes: int, readers: weakref.WeakSet[Reading]) -> None:
        """Counts memory as used until all readings in `readers`, including those added later, have
        finished. If the total is too large, aborts the oldest readings."""
        self._copies = deque(
            each for each in self._copies if any(reading.remaining for reading in each[1])
        )
        if not any(known is readers for _, known in self._copies):
            self._copies.append((nbytes, readers))
        while len(self._copies) > 1 and sum(held for held, _ in self._copies) > self._limit:
            for reading in self._copies.popleft()[1]:
                reading.give_up()
