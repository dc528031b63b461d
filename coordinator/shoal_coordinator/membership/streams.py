"""Streams that end without a goodbye: a death, or a fault of the network between the members and
the coordinator.

A killed process closes its connection at once, and so does a network that drops all of them; from
here the one looks like the other. Told apart by the others: when most members' streams break
together, that is the network, and their leases decide. One that breaks alone is a death, at once if
a peer's collective failed as well, else when no other stream has broken for Policy.break_window_ms:
nobody waits for the dead meanwhile, or it would have said so. A stream that ends long after its
member was last heard of was given up by gRPC: a cut network, or a lost machine. That says no more
than the silence before it did (absence.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_coordinator.membership.absence import is_closed
from shoal_coordinator.membership.draft import Draft
from shoal_coordinator.membership.events import Ending, MemberLost, StreamBroken
from shoal_coordinator.membership.leaving import member_lost


def stream_broken(draft: Draft, event: StreamBroken) -> None:
    """A member's stream has ended. `streams_due` decides what that means."""
    if event.member_id in draft.members:
        draft.broken_streams = {**draft.broken_streams, event.member_id: draft.now.ms}


def streams_due(draft: Draft) -> None:
    """Puts out members whose streams broke, unless they are back, or most others' broke as well."""
    broken = {
        member_id: ms
        for member_id, ms in draft.broken_streams.items()
        if member_id in draft.members
    }
    missed = _missed(draft, broken)
    _lose(draft, missed)
    broken = {member_id: ms for member_id, ms in broken.items() if member_id not in missed}
    if broken and draft.now.ms >= max(broken.values()) + draft.policy.break_window_ms:
        # Whoever is back already broke with the others.
        whole = sum(
            _is_attached(draft, member_id) for member_id in draft.members.keys() - broken.keys()
        )
        if len(broken) > whole:
            draft.reasons.append(
                f"{len(broken)} streams broke together and {whole} did not: a fault of the "
                "network, leases decide"
            )
        else:
            _lose(draft, [member_id for member_id in broken if _is_closed(draft, member_id)])
        broken = {}
    draft.broken_streams = broken


def _missed(draft: Draft, broken: Mapping[str, int]) -> list[str]:
    """Those whose peers' collectives failed, if one of the peers is there to say so."""
    if (
        draft.incident is None
        or draft.generation is None
        or not any(_is_attached(draft, m) for m in draft.incident.reports)
    ):
        return []
    suspects = draft.generation.rank_of.keys() & broken.keys() - draft.incident.reports.keys()
    return sorted(member_id for member_id in suspects if not _is_attached(draft, member_id))


def _lose(draft: Draft, member_ids: list[str]) -> None:
    for member_id in member_ids:
        member_lost(
            draft,
            MemberLost(
                member_id=member_id,
                ending=Ending.STREAM_BROKEN,
                detail="its session's stream broke",
            ),
        )


def _is_closed(draft: Draft, member_id: str) -> bool:
    pulse = draft.pulse(member_id)
    return pulse is None or is_closed(draft, pulse)


def _is_attached(draft: Draft, member_id: str) -> bool:
    pulse = draft.pulse(member_id)
    return pulse is not None and pulse.attached
