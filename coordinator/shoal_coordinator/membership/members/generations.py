"""Decides whether a new generation is due. Runs at the end of each transition, after all its
events."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from shoal_coordinator.membership.members.absence import lose_absent, somebody_absent
from shoal_coordinator.membership.members.failures import incident_moot
from shoal_coordinator.membership.members.forming import draining_in_group, form, holds_state
from shoal_coordinator.membership.members.joining import FEW_READY, stop_for
from shoal_coordinator.membership.members.readmission import is_recovering
from shoal_coordinator.membership.model.draft import Draft
from shoal_coordinator.membership.model.effects import Record, SendMembers, SendStandby, SendStop
from shoal_coordinator.membership.model.state import Cause, JobPhase, MemberPhase

_MOST_NAMED: Final = 5
_PAUSE_MS: Final = 5
"""Delay in milliseconds, per waiting member beyond FEW_READY, before all waiting members are told
again why they are waiting."""


def generation_due(draft: Draft) -> None:
    """Forms a generation if one is due. Puts the job on hold if the newest generation has ended and
    too few members are left."""
    if draft.phase is JobPhase.FINISHED or draft.departing:
        incident_moot(draft)
        return
    if is_recovering(draft):
        return
    if draft.in_phase(MemberPhase.READY) == 0:
        draft.grace_until_ms = None
    elif draft.is_fresh and draft.grace_until_ms is None:
        # The coordinator was restarted before the first generation: restarts the grace period.
        draft.grace_until_ms = draft.now.ms + draft.spec.join_grace_ms
    if draft.phase is JobPhase.WAITING:
        _while_waiting(draft)
    elif draft.broken:
        _after_failure(draft)
    elif draft.phase is JobPhase.RUNNING:
        _at_border(draft)
    _notify_unplaced(draft)


def _after_failure(draft: Draft) -> None:
    """Forms a generation after a failure of the newest one: the survivors continue immediately,
    together with joiners that are ready.

    Draining members are included: they have not reached their step boundary, and the other members
    may need their part of the state.
    """
    lose_absent(draft)
    reason = "; ".join(draft.broken)
    draining = draining_in_group(draft)[
        : draft.spec.max_workers - draft.in_phase(MemberPhase.RANKED)
    ]
    joiners = _joiners(draft, beside=len(draining))
    if draft.in_phase(MemberPhase.RANKED) + len(draining) + joiners >= draft.fewest_workers:
        form(draft, Cause.FAILURE, reason, draining=draining, joiners=joiners)
    else:
        _put_on_hold(draft, reason)


def _while_waiting(draft: Draft) -> None:
    """Forms a generation in a job that is not training, once enough members are waiting.

    A new run waits for the grace period. Members that hold state continue as soon as there are
    enough of them. If all members were lost, new members start once there are as many as before.
    """
    ready = draft.in_phase(MemberPhase.READY)
    if ready < draft.fewest_workers:
        return
    joiners = _joiners(draft)
    all_here = (
        min(draft.spec.max_workers, len(draft.generation.ranks))
        if draft.generation is not None
        else draft.spec.max_workers
    )
    if joiners >= all_here or _grace_is_over(draft):
        form(
            draft,
            Cause.START if draft.is_fresh else Cause.FAILURE,
            f"{ready} members are ready",
            joiners=joiners,
        )
    elif not draft.is_fresh and any(
        holds_state(draft, m) for m in draft.members.values() if m.phase is MemberPhase.READY
    ):
        form(
            draft, Cause.FAILURE, f"{ready} members are ready, enough to continue", joiners=joiners
        )


def _at_border(draft: Draft) -> None:
    """Forms a generation that takes effect at the next step boundary (cause BORDER), so that
    members of a job in training can join and drain."""
    staying = draft.in_phase(MemberPhase.RANKED)
    joiners = _joiners(draft)
    if (
        draft.generation is None
        or draft.incident is not None
        or staying + joiners < draft.fewest_workers
    ):
        # A drain that would leave too few members waits for joiners, or until the member leaves.
        # After a failed collective another generation is due.
        return
    leaving = len(draft.generation.ranks) - staying
    full = staying + joiners == draft.spec.max_workers
    if (
        (leaving or (joiners and (full or _grace_is_over(draft))))
        and _may_supersede(draft)
        and somebody_absent(draft) is None
    ):
        form(draft, Cause.BORDER, f"{joiners} joining, {leaving} leaving", joiners=joiners)


def _may_supersede(draft: Draft) -> bool:
    """Returns whether the newest generation may be replaced now. This is allowed once all of its
    members work in it, or after Policy.boundary_patience_ms. A BORDER generation may also be
    replaced while no member works in it yet.

    If a generation is replaced while only some members work in it, these members wait in vain for
    the members that skip it."""
    generation = draft.generation
    if (
        generation is None
        or draft.formed_ms is None
        or draft.now.ms >= draft.formed_ms + draft.policy.boundary_patience_ms
    ):
        return True
    taken = sum(draft.works_in(rank.member_id) >= generation.number for rank in generation.ranks)
    return taken == len(generation.ranks) or (taken == 0 and generation.cause is Cause.BORDER)


def _put_on_hold(draft: Draft, reason: str) -> None:
    """Puts a job on hold because its newest generation has ended and too few members are left. All
    members wait for others, or leave if the job is stopping."""
    if draft.phase is JobPhase.RUNNING:
        draft.phase = JobPhase.WAITING
    draft.incident = None
    for member in draining_in_group(draft):
        # Its process group has ended, so it will not reach another step boundary.
        draft.effects.append(SendStop(member_id=member.member_id, reason=member.reason, now=True))
    for member in list(draft.members.values()):
        if member.phase is MemberPhase.RANKED:
            draft.last_order += 1
            held = holds_state(draft, member)
            draft.put_member(
                replace(
                    member, phase=MemberPhase.READY, ready_order=draft.last_order, holds_state=held
                )
            )
            draft.unplaced[member.member_id] = None
    draft.reasons.append(f"on hold: {reason}")
    draft.records.append(
        Record(kind="job_on_hold", generation=draft.number, attributes={"reason": reason})
    )
    draft.effects.append(SendMembers(generation=draft.number, member_ids=(), key_digests=()))


def _notify_unplaced(draft: Draft) -> None:
    """Tells members that have just begun to wait for a rank why they are waiting. If the reason has
    changed, tells all ready members."""
    wait = draft.in_phase(MemberPhase.READY) > 0 and draft.phase in (
        JobPhase.WAITING,
        JobPhase.RUNNING,
    )
    why = _why_ready_ones_wait(draft) if wait else None
    looked = draft.looked_ms == draft.now.ms
    # While many members arrive, each arrival changes the reason.
    pause_ms = _PAUSE_MS * max(0, draft.in_phase(MemberPhase.READY) - FEW_READY)
    due = draft.standby_sent_ms is None or draft.now.ms >= draft.standby_sent_ms + pause_ms
    if looked and due and why != draft.standby_text:
        draft.standby_text, draft.standby_sent_ms = why, draft.now.ms
        draft.unplaced.update(
            dict.fromkeys(
                m.member_id for m in draft.members.values() if m.phase is MemberPhase.READY and why
            )
        )
    for member_id in draft.unplaced:
        member = draft.members[member_id]
        reason = f"quarantined: {member.reason}" if member.phase is MemberPhase.QUARANTINED else why
        if draft.phase is JobPhase.STOPPING:
            draft.effects.append(stop_for(draft, member))
        elif reason is not None:
            draft.effects.append(
                SendStandby(member_id=member_id, reason=reason, apart_from=member.apart_from)
            )


def _why_ready_ones_wait(draft: Draft) -> str | None:
    """Returns the reason why ready members will not get a rank soon; None if they are waiting only
    for the end of the grace period or for a step boundary."""
    if draft.phase is not JobPhase.RUNNING:
        waiting = draft.in_phase(MemberPhase.READY) < draft.fewest_workers
        return _who_is_missing(draft) if waiting else None
    if draft.in_phase(MemberPhase.RANKED) >= draft.spec.max_workers:
        return f"the job is full (max_workers={draft.spec.max_workers})"
    if (absent := somebody_absent(draft)) is not None:
        return (
            f"member {absent.member_id} on {absent.identity.host} is not responding; its peers are "
            "training, but the next step boundary must wait for it"
        )
    return None


def _who_is_missing(draft: Draft) -> str:
    ready, joined = draft.in_phase(MemberPhase.READY), draft.in_phase(MemberPhase.JOINED)
    parts = [f"waiting for {draft.fewest_workers} members: {ready} ready"]
    if joined:
        parts.append(f"{joined} still starting")
    gone = (
        []
        if draft.generation is None
        else [
            f"rank {place} on {rank.host} "
            f"({draft.departed[rank.member_id].ending.replace('_', ' ')})"
            for place, rank in enumerate(draft.generation.ranks)
            if rank.member_id in draft.departed
        ]
    )
    if gone:
        parts.append(
            f"gone {', '.join(gone[:_MOST_NAMED])}"
            + (f" and {len(gone) - _MOST_NAMED} more" if len(gone) > _MOST_NAMED else "")
        )
    return ", ".join(parts)


def _joiners(draft: Draft, *, beside: int = 0) -> int:
    """Returns how many ready members fit into a generation that also contains the members with a
    rank and `beside` other members; 0 if the job is stopping."""
    if draft.phase is JobPhase.STOPPING:
        return 0
    return min(
        draft.in_phase(MemberPhase.READY),
        draft.spec.max_workers - draft.in_phase(MemberPhase.RANKED) - beside,
    )


def _grace_is_over(draft: Draft) -> bool:
    return draft.grace_until_ms is None or draft.now.ms >= draft.grace_until_ms
