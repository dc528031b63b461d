"""Reading a partition in pieces while others may change it: copy on write.

A reading sees the values of the moment it was opened. As long as nobody changes the partition it reads them where they are; before a push
is applied, what open readings have not read yet is copied for them. So a pull normally costs no copy of its own, takes no lock, and a slow
reader delays nobody.
"""

from __future__ import annotations

import torch

from shoal_ps_server.shard.payload import bytes_of


class Reading:
    """One reader's place in one partition. Belongs to the thread that owns the shard."""

    def __init__(self, values: torch.Tensor, *, version: int) -> None:
        self.version = version
        self._rest = bytes_of(values)

    def take(self, nbytes: int) -> memoryview:
        """The next bytes, at most `nbytes`; empty at the end. Live: copy them before anything else happens to the shard."""
        piece, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return piece

    @property
    def rest(self) -> memoryview:
        """What was not read yet; as live as what `take` gives."""
        return self._rest

    @property
    def remaining(self) -> int:
        """Bytes not read yet."""
        return self._rest.nbytes

    def detach(self) -> None:
        """The values are about to change: keeps what was not read yet."""
        self._rest = memoryview(bytes(self._rest))
