"""Outgoing messages of one stream. At most one message of each kind is unsent: a newer message
replaces an older one, so a slow reader receives the latest generation rather than every
generation."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import Final, Self

from shoal_common.errors import ShoalError, UnavailableError

from shoal_coordinator.membership.model.reasons import Refusal
from shoal_coordinator.membership.transition import Outcome


class Slot(enum.Enum):
    """Kind of an outgoing message. A newer message replaces an unsent one of the same kind."""

    WELCOME = enum.auto()
    PLACEMENT = enum.auto()
    """A generation or a standby notice; each replaces the other."""
    DRAIN = enum.auto()
    STOP = enum.auto()
    MEMBERS = enum.auto()
    PLACE = enum.auto()
    SETTLED = enum.auto()
    MOVE = enum.auto()
    NOTICE = enum.auto()

    # faster than enum's own __hash__, which is Python code; thousands of mailboxes receive messages
    # at the same time
    __hash__ = object.__hash__


_MOST_UNDECIDED: Final = 64
"""Maximum number of messages of a session whose outcome is not known yet. A session has few things
to report, each once, but may report more before Redis has accepted the older reports."""


class Mailbox:
    """Serialized messages for one stream, in order. The job's loop posts messages; the stream's
    handler iterates over the mailbox to send them."""

    def __init__(self) -> None:
        self._undecided = 0
        """Number of received messages whose outcome is not known yet."""
        self._slots: dict[Slot, bytes] = {}
        self._ended = False
        self._error: ShoalError | None = None
        self._waiting: asyncio.Future[None] | None = None
        """Future that the stream's handler awaits until there is something to send."""

    def post(self, slot: Slot, message: bytes) -> None:
        """Adds a message, to be sent after the messages already queued."""
        self._slots.pop(slot, None)
        self._slots[slot] = message
        self._wake()

    def take(self) -> Callable[[Outcome], None]:
        """Counts a received message that requires a decision. Returns the callback for the outcome
        of this decision. Raises UnavailableError if too many messages are waiting for an
        outcome."""
        if self._undecided >= _MOST_UNDECIDED:
            raise UnavailableError(
                f"this session has reached the limit of {self._undecided} messages waiting for "
                "Redis; reconnect, and send each message only once",
                reason=Refusal.QUEUE_LIMIT,
            )
        self._undecided += 1
        return self._decided

    def _decided(self, outcome: Outcome) -> None:
        self._undecided -= 1
        if isinstance(outcome, ShoalError):
            self.end(outcome)

    def end(self, error: ShoalError | None = None) -> None:
        """Closes the stream immediately, with or without an error. Later calls have no effect."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._wake()

    @property
    def error(self) -> ShoalError | None:
        """Error that closed the stream; None if it is open or was closed without an error."""
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
