"""Memory shared by a client and a server on one machine: a ring of fixed-size pieces that one side
fills and the other side empties.

The server creates the memory, makes the kernel allocate all its pages, and seals its size before a
client sees it. A client therefore cannot cause a SIGBUS in the server by truncating the memory, and
the server never maps memory that a client has created. The server copies a piece before it inspects
it, so that the client cannot change a value after it has been checked.

The pages are freed when the connection is closed. Allocating new memory for each partition and
sealing it against writing would save the server's copy, but the page faults would cost three times
as much as the copy (docs/explanation/parameter-servers.md#transport).
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
"""Number of pieces. One is being filled and one emptied; the third keeps the two sides from waiting
for each other. All three together fit into a processor's cache."""
AREA_BYTES: Final = PIECES * DATA_BYTES

_SIZE_SEALS: Final = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK and F_SEAL_GROW of fcntl(2)


class SharedArea:
    """One side's view of a connection's shared pieces. It must be closed."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self._filled = 0
        self._emptied = 0

    @classmethod
    def make(cls) -> tuple[Self, int]:
        """Creates an area. Returns it and its file descriptor, which the other side maps and the
        caller must close. Raises OSError if there is no memory or the system lacks memfd."""
        if not is_supported():
            raise OSError("this system cannot seal shared memory (memfd_create is missing)")
        descriptor = os.memfd_create("shoal-bulk", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # raises an error if there is no memory; writing to an unallocated page would instead
            # raise a signal
            os.posix_fallocate(descriptor, 0, AREA_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            return cls(mmap.mmap(descriptor, AREA_BYTES)), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def received(cls, descriptor: int, nbytes: int) -> Self:
        """Maps an area that the server has created. Takes ownership of `descriptor`. Raises
        CorruptDataError if the area is invalid, and OSError if it cannot be mapped."""
        try:
            size, seals = os.fstat(descriptor).st_size, fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if size != nbytes or nbytes != AREA_BYTES or seals & _SIZE_SEALS != _SIZE_SEALS:
                raise CorruptDataError(
                    f"the server shared {size} bytes with seals {seals:#x}; expected {AREA_BYTES} "
                    f"bytes with seals {_SIZE_SEALS:#x}",
                    reason="STREAM_MALFORMED",
                )
            return cls(mmap.mmap(descriptor, nbytes))
        finally:
            os.close(descriptor)

    @property
    def is_full(self) -> bool:
        """True if every piece contains data that the other side has not read."""
        return self._filled - self._emptied >= PIECES

    @property
    def in_use(self) -> int:
        """Number of pieces that contain data."""
        return self._filled - self._emptied

    def fill(self, data: memoryview) -> None:
        """Copies at most DATA_BYTES into the next piece, which must be free."""
        assert not self.is_full, "the sender must wait for a free piece"
        start = self._filled % PIECES * DATA_BYTES
        self._view[start : start + data.nbytes] = data
        self._filled += 1

    def next_filled(self, nbytes: int) -> memoryview:
        """Returns a view of the next piece that the other side has filled. The other side may still
        change the bytes: copy them before calling `next_filled` or `fill` again."""
        start = self._filled % PIECES * DATA_BYTES
        self._filled += 1
        self._emptied += 1
        return self._view[start : start + nbytes]

    def freed(self) -> bool:
        """Marks the oldest filled piece as free, because the other side has read it. Returns False
        if no piece contains data."""
        if not self.in_use:
            return False
        self._emptied += 1
        return True

    def close(self) -> None:
        """Releases the mapping once no view is alive. Idempotent."""
        self._view.release()
        with contextlib.suppress(BufferError):
            # a view is still in use, e.g. in the traceback of an error
            self._memory.close()


def is_supported() -> bool:
    """Returns whether this system supports sealed shared memory, which only Linux does."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
