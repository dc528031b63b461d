"""Memory that a client and a server on one machine share: pieces that one side fills and the other
empties, in turn.

The server makes it, has the kernel give it all of its pages, and seals its size, before a client
sees it. So nothing that a client does can take pages away beneath the server (a SIGBUS), and the
server maps nothing that a client has made. What a client puts into a piece the server copies out
before it looks at it: a value that was checked cannot be changed after that.

The pages stay for as long as the connection does. Fresh memory for each partition, sealed against
writing, would save the server's copy, and cost three times as much in page faults
(docs/decisions/0196).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import Final, Self

from shoal_common.bulk.frames import DATA_BYTES
from shoal_common.errors import CorruptDataError

PIECES: Final = 3
"""One is filled and one emptied at a time; the third keeps both sides from waiting. All together
they fit into a processor's cache."""
AREA_BYTES: Final = PIECES * DATA_BYTES

_SIZE_SEALS: Final = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK and F_SEAL_GROW of fcntl(2)


class SharedArea:
    """Both sides' view of one connection's pieces. `close` it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self._filled = 0
        self._emptied = 0

    @classmethod
    def make(cls) -> tuple[Self, int]:
        """Returns the area and the descriptor that the other side maps, which is the caller's to
        close. Raises OSError: no memory, or a system without memfd."""
        if not is_supported():
            raise OSError("this system has no memory that can be sealed (memfd_create)")
        descriptor = os.memfd_create("shoal-bulk", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # an error here, where writing to a page that cannot be had would be a signal
            os.posix_fallocate(descriptor, 0, AREA_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            return cls(mmap.mmap(descriptor, AREA_BYTES)), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def received(cls, descriptor: int, nbytes: int) -> Self:
        """Maps what the server has sent; takes the descriptor over. Raises CorruptDataError unless
        it is such an area, and OSError."""
        try:
            size, seals = os.fstat(descriptor).st_size, fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if size != nbytes or nbytes != AREA_BYTES or seals & _SIZE_SEALS != _SIZE_SEALS:
                raise CorruptDataError(
                    f"the server shares {size} bytes with the seals {seals:#x}, expected "
                    f"{AREA_BYTES} bytes with {_SIZE_SEALS:#x}",
                    reason="STREAM_MALFORMED",
                )
            return cls(mmap.mmap(descriptor, nbytes))
        finally:
            os.close(descriptor)

    @property
    def is_full(self) -> bool:
        """Every piece holds data that the other side has not read."""
        return self._filled - self._emptied >= PIECES

    @property
    def in_use(self) -> int:
        """Pieces that hold data."""
        return self._filled - self._emptied

    def fill(self, data: memoryview) -> None:
        """Copies at most DATA_BYTES into the next piece. Only where one is free."""
        assert not self.is_full, "the sender waits for a free piece"
        start = self._filled % PIECES * DATA_BYTES
        self._view[start : start + data.nbytes] = data
        self._filled += 1

    def next_filled(self, nbytes: int) -> memoryview:
        """What the other side has put into the next piece: it may still change it. Copy it before
        `fill` or this is called again."""
        start = self._filled % PIECES * DATA_BYTES
        self._filled += 1
        self._emptied += 1
        return self._view[start : start + nbytes]

    def freed(self) -> bool:
        """The other side has read the oldest piece; False: it cannot have, none holds data."""
        if not self.in_use:
            return False
        self._emptied += 1
        return True

    def close(self) -> None:
        """Gives the memory back, or leaves that to the end of the last view of it. Idempotent."""
        self._view.release()
        with contextlib.suppress(BufferError):  # an error's traceback, say, holds a view
            self._memory.close()


def is_supported() -> bool:
    """Whether this system has what sharing memory needs: Linux."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
