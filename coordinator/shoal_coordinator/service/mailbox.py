"""What a stream has still to be sent. Bounded by its kinds: a newer message of a kind replaces one
that was not sent yet, so a slow reader finds the latest generation and not every one between."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import Final, Self

from shoal_common.errors import ShoalError, UnavailableError

from shoal_coordinator.membership.reasons import Refusal
from shoal_coordinator.membership.transition import Outcome


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

    # enum's own is Python code, and thousands of mailboxes are posted to at once
    __hash__ = object.__hash__


_MOST_UNDECIDED: Final = 64
"""Who has a session has few things to say, and each once; a newer report may follow an older one
that Redis has not taken yet."""


class Mailbox:
    """Serialized messages to one stream, in order. Iterated by the stream's handler; posted to by
    the job's loop."""

    def __init__(self) -> None:
        self._undecided = 0
        """Messages of the stream that wait for their outcome."""
        self._slots: dict[Slot, bytes] = {}
        self._ended = False
        self._error: ShoalError | None = None
        self._waiting: asyncio.Future[None] | None = None
        """What the stream's handler waits for while there is nothing to send."""

    def post(self, slot: Slot, message: bytes) -> None:
        """To be sent after what is there already."""
        self._slots.pop(slot, None)
        self._slots[slot] = message
        self._wake()

    def take(self) -> Callable[[Outcome], None]:
        """A message of the stream is to be decided about; returns what is called with the outcome.
        Raises UnavailableError where too many wait already."""
        if self._undecided >= _MOST_UNDECIDED:
            raise UnavailableError(
                f"this session has {self._undecided} messages that Redis has not taken yet, which "
                "is all that may wait; connect again, and say once what there is to say",
                reason=Refusal.QUEUE_LIMIT,
            )
        self._undecided += 1
        return self._decided

    def _decided(self, outcome: Outcome) -> None:
        self._undecided -= 1
        if isinstance(outcome, ShoalError):
            self.end(outcome)

    def end(self, error: ShoalError | None = None) -> None:
        """Ends the stream at once, with an error or without. The first end counts."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._wake()

    @property
    def error(self) -> ShoalError | None:
        """What the stream was ended with."""
        return self._error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._ended and not self._slots:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self._error is not None:
            raise self._error
        if self._ended:
            raise StopAsyncIteration
        return self._slots.pop(next(iter(self._slots)))

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
