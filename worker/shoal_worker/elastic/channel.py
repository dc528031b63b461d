"""What operations between steps exchange bytes over: a generation's group, or a world of one."""

from __future__ import annotations

from typing import Protocol


class Channel(Protocol):
    """What an operation between steps may use: a `Group`, or a `LocalChannel`."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def exchange(self, payload: bytes) -> list[bytes]:
        """Sends `payload` to all ranks and returns everybody's, in rank order."""
        ...


class LocalChannel:
    """A world of one."""

    rank = 0
    world_size = 1

    def exchange(self, payload: bytes) -> list[bytes]:
        """Returns what was given."""
        return [payload]
