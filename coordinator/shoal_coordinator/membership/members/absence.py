"""Decides whether members that stopped sending heartbeats are dead, hung, or healthy but cut off
from the coordinator.

Silence alone cannot distinguish these cases. A member whose lease has expired is evicted if another
member is waiting for it or cannot continue without it. A member that is still training with its
peers keeps its rank, for at most Policy.absence_ms. Whether it is training is inferred from its
peers: in synchronous training no step is committed without it, so its peers would be waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_coordinator.membership.members.joining import has_place
from shoal_coordinator.membership.members.leaving import member_lost
from shoal_coordinator.membership.model.draft import Draft
from shoal_coordinator.membership.model.events import Ending, LeaseEnded, MemberLost
from shoal_coordinator.membership.model.pulse import Pulse
from shoal_coordinator.membership.model.state import Cause, JobPhase, Member, MemberPhase


@dataclass(frozen=True, kw_only=True)
class Heard:
    """Summary of the latest heartbeats of the newest generation's members. Members without a recent
    heartbeat are ignored."""

    count: int
    waited_ms: int
    """Shortest time, in milliseconds, that any of these members has been waiting for its peers; 0
    if any of them is not waiting."""


def heard_of(draft: Draft) -> Heard:
    """Summarizes the heartbeats of the members of the newest generation. Ignores members without a
    recent heartbeat."""
    ranks = () if draft.generation is None else draft.generation.ranks
    now_ms, unheard_ms = draft.now.ms, draft.spec.unheard_ms
    pulses = [
        p
        for rank in ranks
        if (p := draft.pulse(rank.member_id)) is not None and p.silent_ms(now_ms) <= unheard_ms
    ]
    return Heard(
        count=len(pulses), waited_ms=min((draft.waited_ms(pulse) for pulse in pulses), default=0)
    )


def leases_ended(draft: Draft, events: list[LeaseEnded]) -> None:
    """Evicts members whose lease has expired, except members that may still be training and that no
    other member is known to need."""
    if not events:
        return
    heard = heard_of(draft)
    for event in events:
        member, pulse = draft.members.get(event.member_id), draft.pulse(event.member_id)
        if (
            member is None
            or pulse is None
            or (why := _why_evicted(draft, member, pulse, heard)) is None
        ):
            continue
        detail = f"no heartbeat for {pulse.silent_ms(draft.now.ms)} ms, {why}"
        member_lost(
            draft, MemberLost(member_id=event.member_id, ending=Ending.LEASE_EXPIRED, detail=detail)
        )


def lose_absent(draft: Draft) -> None:
    """Evicts absent members, because they would not receive a new generation. Called when a
    generation must be formed immediately."""
    now_ms, lease_ms = draft.now.ms, draft.spec.lease_ms
    suspects = [
        name
        for name, p in draft.pulses.members.items()
        if p.detached_ms is not None or p.silent_ms(now_ms) > lease_ms
    ]
    for member in [
        m
        for name in suspects
        if (m := draft.members.get(name)) is not None and m.phase is MemberPhase.RANKED
    ]:
        pulse = draft.pulses.members[member.member_id]
        if pulse.silent_ms(now_ms) > lease_ms:
            detail = (
                f"no heartbeat for {pulse.silent_ms(now_ms)} ms, and its peers continued without it"
            )
            member_lost(
                draft,
                MemberLost(member_id=member.member_id, ending=Ending.LEASE_EXPIRED, detail=detail),
            )
        elif (
            pulse.detached_ms is not None
            and now_ms >= pulse.detached_ms + draft.policy.reconnect_ms
        ):
            detail = (
                f"its session's stream broke {now_ms - pulse.detached_ms} ms ago, and its peers "
                "continued without it"
            )
            member_lost(
                draft,
                MemberLost(member_id=member.member_id, ending=Ending.STREAM_BROKEN, detail=detail),
            )


def somebody_absent(draft: Draft) -> Member | None:
    """Returns a ranked member that is absent; None if there is none. An absent member would not
    receive a new generation, and would therefore keep its peers from reaching a step boundary."""
    for member in draft.members.values():
        pulse = draft.pulse(member.member_id)
        if (
            member.phase is MemberPhase.RANKED
            and pulse is not None
            and pulse.silent_ms(draft.now.ms) > draft.spec.lease_ms
        ):
            return member
    return None


def is_closed(draft: Draft, pulse: Pulse) -> bool:
    """Returns whether a member's stream closed soon after a heartbeat, as happens when a process
    exits. A network failure closes a stream only after a longer silence."""
    return (
        pulse.detached_ms is not None
        and pulse.detached_ms - pulse.heard_ms <= draft.policy.closed_within_ms
    )


def _why_evicted(draft: Draft, member: Member, pulse: Pulse, heard: Heard) -> str | None:
    """Returns the reason for evicting a silent member; None if it should not be evicted yet. It is
    evicted if other members need it, and in any case if it has closed its stream or has been silent
    for too long."""
    longest_ms = (
        draft.policy.absence_ms if pulse.progress.sequence else draft.policy.quiet_absence_ms
    )
    if pulse.silent_ms(draft.now.ms) > longest_ms:
        return "longer than any member may be silent"
    if is_closed(draft, pulse):
        return "and its session's stream was closed"
    if draft.phase is JobPhase.FINISHED or draft.departing:
        return None
    if draft.spec.parameter_servers or draft.layout is not None or draft.count_loaders():
        return "and its leased batches need another worker"
    if member.phase is MemberPhase.READY:
        return "while it was waiting for a rank"
    if not has_place(draft, member):
        return None
    return _why_missed(draft, member, pulse, heard)


def _why_missed(draft: Draft, member: Member, pulse: Pulse, heard: Heard) -> str | None:
    generation = draft.generation
    if draft.incident is not None and draft.incident.reports.keys() - {member.member_id}:
        return "and its peers' collective failed"
    awaited = (
        generation is not None
        and generation.cause is not Cause.BORDER
        and pulse.generation < generation.number
    )
    if (
        awaited
        and draft.formed_ms is not None
        and draft.now.ms > draft.formed_ms + draft.spec.lease_ms
    ):
        return f"and it has not entered generation {draft.number}"
    if heard.count and heard.waited_ms >= draft.spec.lease_ms - draft.spec.unheard_ms:
        return f"and all {heard.count} responsive peers are waiting"
    return None
