"""Tickets for bulk connections. A ticket opens one connection for one member, and expires after a
few seconds. Pure: the caller passes the time."""

from __future__ import annotations

import hmac
import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from shoal_common.bulk.frames import TICKET_BYTES
from shoal_common.errors import AuthenticationError, LimitError

GOOD_FOR_S: Final = 10.0
MOST_OF_A_MEMBER: Final = 8
"""Maximum number of connections of one member, including unused tickets."""
MOST_OF_READERS: Final = 256
"""Maximum number of connections of all anonymous clients together, including unused tickets."""


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """Member, or anonymous reader, on whose behalf a bulk connection is used."""

    member_id: str
    """Id of the member; empty for an anonymous client."""
    key: str = field(default="", repr=False)
    """Key of the member, as presented when the ticket was requested. It is checked for each stream,
    since the server may not know the member when it issues the ticket."""


@dataclass(frozen=True, kw_only=True)
class _Issued:
    ticket: bytes
    speaker: Speaker
    until: float

    @property
    def member_id(self) -> str:
        return self.speaker.member_id


class Tickets:
    """The tickets of one server, and the connections that were opened with them."""

    def __init__(self, *, most_together: int) -> None:
        """`most_together`: maximum number of connections of all members together, including unused
        tickets."""
        self._most_together = most_together
        self._issued: list[_Issued] = []
        """Unused tickets, oldest first."""
        self._open: Counter[str] = Counter()
        """Member -> number of its open connections."""

    def issue(self, speaker: Speaker, now: float) -> bytes:
        """Returns a ticket for a connection on behalf of `speaker`.

        Raises LimitError / CONNECTIONS_EXHAUSTED.
        """
        member_id = speaker.member_id
        self._issued = [each for each in self._issued if each.until > now]
        own = self._open[member_id] + sum(each.member_id == member_id for each in self._issued)
        most = MOST_OF_A_MEMBER if member_id else MOST_OF_READERS
        if own >= most or self._open.total() + len(self._issued) >= self._most_together:
            raise LimitError(
                f"member {member_id!r} has {own} of at most {most} bulk connections, and all "
                f"members together have {self._open.total()} of {self._most_together} (1024, or "
                "as many as the server's limit on open files allows); close some, or push and "
                "pull over gRPC",
                reason="CONNECTIONS_EXHAUSTED",
            )
        issued = _Issued(
            ticket=secrets.token_bytes(TICKET_BYTES), speaker=speaker, until=now + GOOD_FOR_S
        )
        self._issued.append(issued)
        return issued.ticket

    def redeem(self, ticket: bytes, now: float) -> Speaker:
        """Returns the speaker that a ticket was issued to. The ticket cannot be used again. The
        connection counts as open until `closed` is called.

        Raises AuthenticationError / TICKET_INVALID.
        """
        found = None
        for issued in (
            self._issued
        ):  # compares with all tickets, so that the time taken does not reveal which one matches
            if hmac.compare_digest(issued.ticket, ticket):
                found = issued
        if found is not None:
            self._issued.remove(found)
        if found is None or found.until <= now:
            raise AuthenticationError(
                f"the ticket is unknown, already used, or older than {GOOD_FOR_S:g} s; request "
                "another one with OpenData",
                reason="TICKET_INVALID",
            )
        self._open[found.member_id] += 1
        return found.speaker

    def closed(self, member_id: str) -> None:
        """Records that one of a member's connections has been closed."""
        self._open[member_id] -= 1
        if not self._open[member_id]:
            del self._open[member_id]
