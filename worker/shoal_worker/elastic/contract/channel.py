"""Exchange of bytes between ranks in operations between steps, through a generation's group or in a
world of one."""

from __future__ import annotations

from typing import Protocol


class Channel(Protocol):
    """Interface for exchanging bytes with all ranks in operations between steps; implemented by
    `Group` and `LocalChannel`."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def exchange(self, payload: bytes) -> list[bytes]:
        """Sends `payload` to all ranks and returns every rank's payload, in rank order."""
        ...


class LocalChannel:
    """`Channel` in a world of one."""

    rank = 0
    world_size = 1

    def exchange(self, payload: bytes) -> list[bytes]:
        """Returns a list that contains only `payload`."""
        return [payload]
