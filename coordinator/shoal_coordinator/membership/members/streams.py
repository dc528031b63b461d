"""Decides the meaning of streams that end before their member left: a death, or a network fault
between the members and the coordinator.

A killed process closes its connection at once, and a failing network can drop all connections at
once; to the coordinator, both look alike. The other members' streams distinguish the two cases. If
most members' streams break together, the network is at fault, and the leases decide. A single
broken stream means a death: immediately if a peer's collective failed as well, otherwise once no
other stream has broken for Policy.break_window_ms. The short wait delays nobody, since a peer that
needed the dead member would have reported a failure. A stream that ends long after the last
heartbeat was abandoned by gRPC because of a network failure or a lost machine; it adds nothing to
the silence before it (absence.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_coordinator.membership.members.absence import is_closed
from shoal_coordinator.membership.members.leaving import member_lost
from shoal_coordinator.membership.model.draft import Draft
from shoal_coordinator.membership.model.events import Ending, MemberLost, StreamBroken


def stream_broken(draft: Draft, event: StreamBroken) -> None:
    """Records that a member's stream has ended. `streams_due` decides about the member."""
    if event.member_id in draft.members:
        draft.broken_streams = {**draft.broken_streams, event.member_id: draft.now.ms}


def streams_due(draft: Draft) -> None:
    """Evicts members whose streams broke, unless they have reconnected or most other streams broke
    as well."""
    broken = {
        member_id: ms
        for member_id, ms in draft.broken_streams.items()
        if member_id in draft.members
    }
    missed = _missed(draft, broken)
    _lose(draft, missed)
    broken = {member_id: ms for member_id, ms in broken.items() if member_id not in missed}
    if broken and draft.now.ms >= max(broken.values()) + draft.policy.break_window_ms:
        # Members that have already reconnected also count as broken together with the others.
        whole = sum(
            _is_attached(draft, member_id) for member_id in draft.members.keys() - broken.keys()
        )
        if len(broken) > whole:
            draft.reasons.append(
                f"{len(broken)} streams broke at the same time and {whole} did not: this is a "
                "network fault, so leases decide"
            )
        else:
            _lose(draft, [member_id for member_id in broken if _is_closed(draft, member_id)])
        broken = {}
    draft.broken_streams = broken


def _missed(draft: Draft, broken: Mapping[str, int]) -> list[str]:
    """Returns the members whose streams broke while their peers' collectives failed. Returns none
    unless a reporting peer is still connected."""
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
