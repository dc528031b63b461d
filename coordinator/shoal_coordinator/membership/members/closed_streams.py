"""Interprets a closed stream whose member has not left: either the member has died, or the network
between the members and the coordinator has failed.

When a process is killed, its connection closes immediately. A failing network can also close
connections, usually many at the same time. A single closed connection looks the same in both cases;
the other members' streams make the difference. If most streams break together, the network has
failed, and the leases decide. If a single stream breaks, its member counts as dead: immediately if
a peer's collective has failed too, otherwise once no other stream has broken for
Policy.break_window_ms. This short wait does not delay any recovery, because a peer that needed the
dead member would have reported a failure. If a stream closes long after the last heartbeat, gRPC
has closed it because of a network failure or a lost machine; the closed stream then means no more
than the preceding silence (absence.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_coordinator.membership.members.absence import is_closed
from shoal_coordinator.membership.members.leaving import member_lost
from shoal_coordinator.membership.model.draft import Draft
from shoal_coordinator.membership.model.events import Ending, MemberLost, StreamBroken


def stream_broken(draft: Draft, event: StreamBroken) -> None:
    """Records that a member's stream has closed. `streams_due` decides what this means."""
    if event.member_id in draft.members:
        draft.broken_streams = {**draft.broken_streams, event.member_id: draft.now.ms}


def streams_due(draft: Draft) -> None:
    """Evicts members whose streams have broken, unless they have reconnected, or so many other
    streams have broken that the network is the likely cause."""
    broken = {
        member_id: ms
        for member_id, ms in draft.broken_streams.items()
        if member_id in draft.members
    }
    missed = _missed(draft, broken)
    _lose(draft, missed)
    broken = {member_id: ms for member_id, ms in broken.items() if member_id not in missed}
    if broken and draft.now.ms >= max(broken.values()) + draft.policy.break_window_ms:
        # Streams of members that have already reconnected are counted as broken too.
        whole = sum(
            _is_attached(draft, member_id) for member_id in draft.members.keys() - broken.keys()
        )
        if len(broken) > whole:
            draft.reasons.append(
                f"{len(broken)} streams broke at the same time and {whole} did not: this is a "
                "network failure, so leases decide which members are lost"
            )
        else:
            _lose(draft, [member_id for member_id in broken if _is_closed(draft, member_id)])
        broken = {}
    draft.broken_streams = broken


def _missed(draft: Draft, broken: Mapping[str, int]) -> list[str]:
    """Returns the members whose streams broke while their peers' collectives failed. The result is
    empty unless one of the peers that reported a failure is still connected."""
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
