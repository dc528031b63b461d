"""Reading a partition in pieces while others may change it: copy on write.

A reading sees the values of the moment it was opened. As long as nobody changes the partition it
reads them where they are; before a push is applied, the values are copied once for all that have
not read to their end. So a pull normally costs no copy of its own, takes no lock, and a slow reader
delays nobody. Where readers are so slow that the copies would be too many, those that began first
are ended.

Who reads compressed values reads a copy from the beginning, one for all that read that version at
the same time.
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
"""Together, of a server's copies for readers."""
RETRY_AFTER: Final = timedelta(seconds=1)
"""Who was ended reads again after that: others may have come to their ends by then."""


class Reading:
    """One reader's place in one partition. Belongs to the thread that owns the shard."""

    def __init__(
        self, values: torch.Tensor, *, version: int, encoded: EncodedValues | None = None
    ) -> None:
        """`encoded`: whose payload `values` is, if they are not the partition's own."""
        self.version = version
        self._encoded = encoded
        self._rest = bytes_of(values)
        self._given_up = False
        self._promised = 0

    def take(self, nbytes: int) -> memoryview:
        """The next bytes, at most `nbytes`; empty at the end. Live: copy them before anything else
        happens to the shard.

        Raises UnavailableError / PULL_TOO_SLOW when they were given up.
        """
        self._check_held()
        piece, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        self._promised = max(0, self._promised - nbytes)
        return piece

    def promise(self, nbytes: int) -> None:
        """The reader has been told that so many bytes follow: these can be taken also when the rest
        is given up. Raises as `take`."""
        self._check_held()
        self._promised = nbytes

    def _check_held(self) -> None:
        if self._given_up and not self._promised:
            raise UnavailableError(
                "the values were read too slowly: copies for readers hold "
                f"{MOST_COPIES_BYTES >> 20} MiB already; pull again",
                reason="PULL_TOO_SLOW",
                retry_after=RETRY_AFTER,
            )

    @property
    def rest(self) -> memoryview:
        """What was not read yet; as live as what `take` gives."""
        return self._rest

    @property
    def remaining(self) -> int:
        """Bytes not read yet."""
        return self._rest.nbytes

    def detach(self, copy: memoryview) -> None:
        """The values are about to change: reads on in `copy`, which has all of them."""
        self._rest = copy[copy.nbytes - self._rest.nbytes :]

    def give_up(self) -> None:
        """The next `take` fails, but for what was promised."""
        self._given_up = True
        # there is something left to take, and that fails
        self._rest = memoryview(bytes(self._rest[: self._promised]) + b"\0")


@dataclass(eq=False)
class EncodedValues:
    """One version of a partition, compressed. Those who read it keep it, and nobody else."""

    payload: torch.Tensor
    """uint8."""
    readers: weakref.WeakSet[Reading] = field(default_factory=weakref.WeakSet)

    def read(self, copies: Copies, *, version: int) -> Reading:
        """One more reader."""
        copies.keep(self.payload.nbytes, self.readers)
        reading = Reading(self.payload, version=version, encoded=self)
        self.readers.add(reading)
        return reading


class Copies:
    """What readers of a server still read that is not the values themselves: copies of such as have
    changed, and compressed ones."""

    def __init__(self, *, limit: int = MOST_COPIES_BYTES) -> None:
        self._limit = limit
        self._copies: deque[tuple[int, weakref.WeakSet[Reading]]] = deque()
        """Bytes, and who reads them; the oldest first."""

    def detach(self, values: torch.Tensor, readings: Iterable[Reading]) -> None:
        """`values` are about to change: those who have not read to their end read on in a copy."""
        unread = weakref.WeakSet(reading for reading in readings if reading.remaining)
        if not unread:
            return
        self.keep(values.nbytes, unread)
        copy = memoryview(bytes(bytes_of(values)))
        for reading in unread:
            reading.detach(copy)

    def keep(self, nbytes: int, readers: weakref.WeakSet[Reading]) -> None:
        """So much more is held while any of these readings, or of those that join them, is not at
        its end. Where that is too much, those that began first are ended."""
        self._copies = deque(
            each for each in self._copies if any(reading.remaining for reading in each[1])
        )
        if not any(known is readers for _, known in self._copies):
            self._copies.append((nbytes, readers))
        while len(self._copies) > 1 and sum(held for held, _ in self._copies) > self._limit:
            for reading in self._copies.popleft()[1]:
                reading.give_up()
