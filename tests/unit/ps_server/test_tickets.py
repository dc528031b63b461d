"""A ticket opens one connection for one member within a few seconds. The numbers of tickets and
connections are limited."""

from __future__ import annotations

import pytest
from shoal_common.bulk.frames import TICKET_BYTES
from shoal_common.errors import AuthenticationError, LimitError
from shoal_ps_server.service.bulk.descriptors import BulkShare
from shoal_ps_server.service.bulk.tickets import GOOD_FOR_S, MOST_OF_A_MEMBER, Speaker, Tickets


def refused(tickets: Tickets, ticket: bytes, now: float) -> bool:
    with pytest.raises(AuthenticationError) as caught:
        tickets.redeem(ticket, now)
    return caught.value.reason == "TICKET_INVALID"


def test_ticket_is_valid_once() -> None:
    tickets = Tickets(most_together=100)
    ticket = tickets.issue(Speaker(member_id="a"), 0.0)
    assert len(ticket) == TICKET_BYTES
    assert tickets.redeem(ticket, 1.0).member_id == "a"
    assert refused(tickets, ticket, 1.0)


def test_ticket_that_was_never_issued_is_refused() -> None:
    tickets = Tickets(most_together=100)
    ticket = tickets.issue(Speaker(member_id="a"), 0.0)
    assert refused(tickets, bytes(TICKET_BYTES), 0.0)
    assert refused(tickets, ticket[:-1], 0.0)
    assert tickets.redeem(ticket, 0.0).member_id == "a"


def test_ticket_is_valid_for_seconds() -> None:
    tickets = Tickets(most_together=100)
    late, early = (
        tickets.issue(Speaker(member_id="a"), 0.0),
        tickets.issue(Speaker(member_id="a"), 0.0),
    )
    assert tickets.redeem(early, GOOD_FOR_S - 0.1).member_id == "a"
    assert refused(tickets, late, GOOD_FOR_S)


def test_connections_and_tickets_of_a_member_are_limited_and_freed_when_one_ends() -> None:
    tickets = Tickets(most_together=100)
    for _ in range(MOST_OF_A_MEMBER - 1):
        tickets.redeem(tickets.issue(Speaker(member_id="a"), 0.0), 0.0)
    tickets.issue(Speaker(member_id="a"), 0.0)
    with pytest.raises(LimitError) as caught:
        tickets.issue(Speaker(member_id="a"), 0.0)
    assert caught.value.reason == "CONNECTIONS_EXHAUSTED"
    tickets.issue(Speaker(member_id="b"), 0.0)  # each member has its own limit
    tickets.issue(Speaker(member_id="a"), GOOD_FOR_S)  # replaces the ticket that was not used
    tickets.closed("a")
    tickets.issue(Speaker(member_id="a"), GOOD_FOR_S)


def test_total_number_of_connections_is_limited() -> None:
    tickets = Tickets(most_together=100)
    for number in range(100):
        tickets.issue(Speaker(member_id=f"member-{number}"), 0.0)
    with pytest.raises(LimitError):
        tickets.issue(Speaker(member_id="one more"), 0.0)


@pytest.mark.parametrize("limit", [0, 64, 256, 1024, 4096, 20_000, 1 << 20])
def test_bulk_channel_uses_at_most_half_of_a_processs_descriptors(limit: int) -> None:
    share = BulkShare.of(limit)
    assert 2 * share.connections + 2 * share.strangers <= max(2, limit // 2)
    assert share.connections >= min(1024, limit // 8)
    assert share.strangers >= 1
