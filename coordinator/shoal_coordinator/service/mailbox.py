"""What a stream has still to be sent. Bounded by its kinds: a newer message of a kind replaces one that was not sent yet, so a slow reader
finds the latest generation and not every one between."""

from __future__ import annotations

import asyncio
import enum
from typing import Self

from shoal_common.errors import ShoalError


class Slot(enum.Enum):
    """Kinds of messages that replace each other."""

    WELCOME = enum.auto()
    PLACEMENT = enum.auto()
    """A generation, or standby: the one ends the other."""
    DRAIN = enum.auto()
    STOP = enum.auto()
    MEMBERS = enum.auto()
    PLACE = enum.auto()
    SETTLED = enum.auto()
    MOVE = enum.auto()
    NOTICE = enum.auto()


class Mailbox:
    """Serialized messages to one stream, in order. Iterated by the stream's handler; posted to by the job's loop."""

    def __init__(self) -> None:
        self.undecided = 0
        """Messages of the stream that wait for their outcome."""
        self._slots: dict[Slot, bytes] = {}
        self._ended = False
        self._error: ShoalError | None = None
        self._changed = asyncio.Event()

    def post(self, slot: Slot, message: bytes) -> None:
        """To be sent after what is there already."""
        self._slots.pop(slot, None)
        self._slots[slot] = message
        self._changed.set()

    def end(self, error: ShoalError | None = None) -> None:
        """Ends the stream at once, with an error or without. The first end counts."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._changed.set()

    @property
    def error(self) -> ShoalError | None:
        """What the stream was ended with."""
        return self._error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._ended and not self._slots:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        if self._ended:
            raise StopAsyncIteration
        return self._slots.pop(next(iter(self._slots)))
