"""Byte exchange for operations between steps: over a generation's group, or in a world of one."""

from __future__ import annotations

from typing import Protocol


class Channel(Protocol):
    """Interface for operations between steps, implemented by `Group` and `LocalChannel`."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def exchange(self, payload: bytes) -> list[bytes]:
        """Sends `payload` to all ranks and returns everybody's, in rank order."""
        ...


class LocalChannel:
    """Channel of a world of one."""

    rank = 0
    world_size = 1

    def exchange(self, payload: bytes) -> list[bytes]:
        """Returns the given payload."""
        return [payload]
