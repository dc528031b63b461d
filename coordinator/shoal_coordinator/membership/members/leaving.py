"""Rules for members that leave: lost members, members that leave on their own, and members that are
asked to leave."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal_common.errors import PreconditionError, UnknownResourceError
from shoal_common.exit_status import EVICTED

from shoal_coordinator.membership.members.forming import holds_state, named
from shoal_coordinator.membership.members.joining import has_place, live_member, stop_for
from shoal_coordinator.membership.members.machines import member_died, member_gone
from shoal_coordinator.membership.members.readmission import is_recovering
from shoal_coordinator.membership.model.draft import Draft
from shoal_coordinator.membership.model.effects import (
    EndSession,
    Record,
    SendDrain,
    SendMembers,
    SendStop,
    StopServers,
)
from shoal_coordinator.membership.model.events import (
    DrainRequested,
    Ending,
    ExitReported,
    LeaveReason,
    MemberLeft,
    MemberLost,
    StopRequested,
)
from shoal_coordinator.membership.model.reasons import Refusal
from shoal_coordinator.membership.model.replicas import compare
from shoal_coordinator.membership.model.state import Cause, JobEnding, JobPhase, Member, MemberPhase

_REFUSAL_OF: Mapping[Ending, Refusal] = {
    Ending.STREAM_BROKEN: Refusal.MEMBER_REPLACED,
    Ending.LEASE_EXPIRED: Refusal.LEASE_EXPIRED,
    Ending.PROCESS_EXITED: Refusal.PROCESS_EXITED,
    Ending.STALLED: Refusal.MEMBER_STALLED,
}


def member_lost(draft: Draft, event: MemberLost) -> None:
    """Removes a member whose process has died without leaving, and interrupts the members that
    worked with it. A repeated report has no effect."""
    member = draft.members.get(event.member_id)
    if member is None:
        return
    if _is_missed(draft, member):
        draft.broken.append(f"lost member {member.member_id}: {event.detail}")
    member_died(draft, member, event)
    _take_out(draft, member, kind="member_lost", ending=event.ending, detail=event.detail)
    if draft.phase is JobPhase.FINISHED and draft.spec.parameter_servers:
        # No generation follows, but members that still train must not wait for this one.
        training = draft.training()
        draft.effects.append(
            SendMembers(
                generation=draft.number,
                member_ids=training,
                key_digests=draft.key_digests(training),
            )
        )
    refusal = _REFUSAL_OF.get(event.ending)
    error = (
        None
        if refusal is None
        else PreconditionError(
            f"member {member.member_id} was evicted: {event.detail}", reason=refusal
        )
    )
    draft.effects.append(EndSession(member_id=member.member_id, error=error))


def member_left(draft: Draft, event: MemberLeft) -> None:
    """Removes a member that leaves. Interrupts the other members, like a loss, unless a generation
    without the member has already been written.

    The first member with a rank that finishes ends the run for all members. A member that was asked
    to leave (phase DRAINING) does not end the run, even if it reports that it has finished.
    """
    member = live_member(draft, event.member_id)
    if event.reason is LeaveReason.FAILED:
        member_lost(
            draft,
            MemberLost(
                member_id=event.member_id,
                ending=Ending.SCRIPT_FAILED,
                detail=event.detail or "its script raised an exception",
            ),
        )
        return
    # A member whose rank Redis has lost keeps training with that rank.
    has_rank = member.phase is MemberPhase.RANKED or (member.holds_state and is_recovering(draft))
    if has_rank and event.reason is LeaveReason.FINISHED:
        if draft.phase is not JobPhase.FINISHED:
            reason = f"member {member.member_id} reached the end of its script"
            _finish(draft, reason)
            _notify_awaiting(draft, member, reason, finished_steps=event.steps)
    elif has_place(draft, member) and draft.phase is JobPhase.STOPPING and not event.alone:
        # All members leave at the same step boundary, so the remaining members have also passed the
        # last step and only have to leave.
        if not draft.departing:
            _notify_awaiting(draft, member, draft.stop_reason)
        draft.departing = True
    elif has_place(draft, member):
        # It left at a step boundary before a generation without it was written: on SIGTERM, or
        # because too few would have remained. If the job is stopping, its peers wait at that
        # boundary for a new generation, and stop at the next boundary.
        draft.broken.append(f"member {member.member_id} left ({event.reason})")
    apart = _compare_replicas(draft, member, event)
    _take_out(
        draft,
        member,
        kind="member_left",
        ending=event.reason,
        detail=event.detail,
        steps=event.steps,
    )
    error = PreconditionError(apart, reason=Refusal.REPLICAS_DIVERGED) if apart else None
    draft.effects.append(EndSession(member_id=member.member_id, error=error))


def _compare_replicas(draft: Draft, member: Member, event: MemberLeft) -> str:
    """Compares a leaving member's state after its last step with the state of members that left
    earlier. If they differ, fails the job. Returns a description of the difference; empty if there
    is none."""
    if event.replicas is None or event.reason is not LeaveReason.FINISHED:
        return ""
    draft.replicas, apart = compare(
        draft.replicas, event.replicas, named(member.identity, draft.place_of(member.member_id))
    )
    if apart:
        draft.reasons.append(apart)
        _fail(draft, apart)
    return apart


@dataclass(frozen=True, kw_only=True)
class ExitNoted:
    """Outcome of an ExitReported event."""

    was_member: bool
    rank: int
    """Rank of the process; -1 if the process had none or its rank is unknown."""


def exit_reported(draft: Draft, event: ExitReported) -> ExitNoted:
    """Records that a launcher has seen a process exit.

    If the process had finished its script, the report replaces the member's Leave message, which
    may still be in transit, or may never have been sent because the coordinator was unreachable.
    Any other exit with status 0 has no effect while the stream is open. If the member was lost with
    its stream before this report, the report adds the cause (`member_exited`).
    """
    known = event.member_id in draft.members
    pulse = draft.pulse(event.member_id)
    clean = event.exit_code == 0 and event.signal == 0
    if known and clean and event.finished:
        member_left(
            draft,
            MemberLeft(
                member_id=event.member_id,
                reason=LeaveReason.FINISHED,
                detail="reported by its launcher",
            ),
        )
    elif known and clean and pulse is not None and pulse.attached:
        pass
    elif known:
        member_lost(
            draft,
            MemberLost(
                member_id=event.member_id,
                ending=Ending.PROCESS_EXITED,
                detail=_how_it_ended(event),
            ),
        )
    if event.failure:
        _fail(draft, event.failure)
    departure = draft.departed.get(event.member_id)
    if (
        not clean
        and (event.signal or event.exit_code != EVICTED)  # that exit is a consequence of the loss
        and departure is not None
        and departure.ending == Ending.STREAM_BROKEN
    ):
        draft.correct_ending(event.member_id, Ending.PROCESS_EXITED)
        draft.records.append(
            Record(
                kind="member_exited",
                generation=draft.number,
                member_id=event.member_id,
                attributes={
                    "rank": "" if departure.rank < 0 else str(departure.rank),
                    "detail": _how_it_ended(event),
                },
            )
        )
    return ExitNoted(
        was_member=known or departure is not None,
        rank=departure.rank if departure is not None else -1,
    )


def _how_it_ended(event: ExitReported) -> str:
    if not event.signal:
        return f"its process ended with exit code {event.exit_code}"
    try:
        return f"its process ended with {signal.Signals(event.signal).name}"
    except ValueError:  # a real-time signal
        return f"its process ended with signal {event.signal}"


@dataclass(frozen=True, kw_only=True)
class DrainNoted:
    """Outcome of a DrainRequested event."""

    member_id: str


def drain_requested(draft: Draft, event: DrainRequested) -> DrainNoted:
    """Starts draining a member, which then leaves at its next step boundary. A repeated request has
    no effect.

    A generation without the member, which takes effect at a step boundary (BORDER), is formed as
    soon as enough members remain or joiners can replace it.
    """
    member = _member_or_rank(draft, event)
    if member.phase is not MemberPhase.DRAINING:
        may_go_at_once = not has_place(draft, member)
        draft.put_member(replace(member, phase=MemberPhase.DRAINING, reason=event.reason))
        draft.unplaced.pop(member.member_id, None)
        draft.records.append(
            Record(
                kind="drain_requested",
                member_id=member.member_id,
                attributes={"reason": event.reason},
            )
        )
        draft.effects.append(SendDrain(member_id=member.member_id, reason=event.reason))
        if may_go_at_once:
            draft.effects.append(
                SendStop(member_id=member.member_id, reason=event.reason, now=True)
            )
    return DrainNoted(member_id=member.member_id)


def drain_refused(draft: Draft) -> None:
    """Drains the members on machines that the job no longer accepts. Does nothing unless the
    condition of a machine has changed in this transition."""
    if not draft.machines_changed or draft.phase not in (JobPhase.WAITING, JobPhase.RUNNING):
        return
    for member in list(draft.members.values()):
        machine = draft.machines.get(member.identity.host)
        if machine is not None and machine.refuses:
            reason = f"machine {member.identity.host} is {machine.condition}: {machine.reason}"
            drain_requested(
                draft, DrainRequested(member_id=member.member_id, rank=None, reason=reason)
            )


def stop_requested(draft: Draft, event: StopRequested) -> None:
    """Asks all members to leave at their next step boundary. Ignores a repeated request, and a
    request for a job that has finished.

    A launcher that runs a plain script, which does not join the job, requests a stop to report the
    script's outcome. Such a request is ignored if the run has or had members."""
    if draft.phase in (JobPhase.STOPPING, JobPhase.FINISHED) or (
        event.ending is not JobEnding.STOPPED and not draft.is_untouched
    ):
        return
    draft.phase, draft.ending = JobPhase.STOPPING, event.ending
    draft.stop_reason = event.reason
    draft.records.append(Record(kind="stop_requested", attributes={"reason": event.reason}))
    for member in draft.members.values():
        draft.effects.append(stop_for(draft, member))
    draft.unplaced.clear()


def last_one_left(draft: Draft) -> None:
    """Finishes a job that is stopping and has no members left, and makes its servers exit. Runs at
    the end of each transition."""
    if draft.members or draft.phase not in (JobPhase.STOPPING, JobPhase.FINISHED):
        return
    if draft.phase is JobPhase.STOPPING:
        _finish(draft, draft.stop_reason)
    draft.effects.append(StopServers(reason=draft.stop_reason))


def _fail(draft: Draft, failure: str) -> None:
    """Fails the job with an error. Only the first error is recorded; it overrides any other
    outcome."""
    if draft.ending is JobEnding.FAILED:
        return
    draft.records.append(
        Record(kind="job_failed", generation=draft.number, attributes={"reason": failure})
    )
    stop_requested(draft, StopRequested(reason=failure))
    draft.ending, draft.stop_reason = JobEnding.FAILED, failure


def _finish(draft: Draft, reason: str) -> None:
    """Ends the run. Members with a rank have confirmed the last step and finish on their own; all
    other members, including spares, are notified. A spare may be waiting for a generation that its
    peers will never adopt."""
    draft.phase, draft.ended_unix_ms = JobPhase.FINISHED, draft.now.unix_ms
    draft.ending = draft.ending or JobEnding.COMPLETED
    draft.stop_reason = draft.stop_reason or reason
    draft.records.append(
        Record(kind="job_finished", generation=draft.number, attributes={"reason": reason})
    )
    for member in draft.members.values():
        pulse = draft.pulse(member.member_id)
        if member.phase in (MemberPhase.JOINED, MemberPhase.READY, MemberPhase.QUARANTINED):
            draft.effects.append(stop_for(draft, member, reason))
        elif pulse is not None and pulse.progress.spare:
            draft.effects.append(SendStop(member_id=member.member_id, reason=reason, now=True))
    draft.unplaced.clear()


def _notify_awaiting(
    draft: Draft, left: Member, reason: str, *, finished_steps: int | None = None
) -> None:
    """Stops members that would wait in vain because `left` has left before it adopted the newest
    generation. At the step boundary where it left, all members would have adopted that generation.

    Three kinds of members would wait in vain: members waiting in their first generation, members
    that have not adopted the generation formed after a failure, and members that were quarantined
    from the generation of `left` and would have returned in the newest one.
    """
    works_in = draft.works_in(left.member_id)
    if works_in >= draft.number:
        return
    for member in draft.members.values():
        if member.phase is not MemberPhase.RANKED or member is left:
            continue
        if holds_state(draft, member):
            interrupted = draft.generation is not None and draft.generation.cause is Cause.FAILURE
            furthest = draft.number if interrupted else works_in
            waits = 0 < draft.works_in(member.member_id) < furthest
        else:
            waits = works_in > 0 or _is_new(draft, member)
        if waits:
            draft.effects.append(
                SendStop(
                    member_id=member.member_id,
                    reason=reason,
                    now=True,
                    finished_steps=finished_steps,
                )
            )


def _is_new(draft: Draft, member: Member) -> bool:
    """Returns whether a connected member joined a job that already had a generation. After a
    restart of the coordinator, only such members are known to hold no state, because the others
    have not reported their generation yet."""
    pulse = draft.pulse(member.member_id)
    return member.replays and pulse is not None and pulse.attached


def _take_out(
    draft: Draft,
    member: Member,
    *,
    kind: str,
    ending: Ending | LeaveReason,
    detail: str,
    steps: int | None = None,
) -> None:
    rank = draft.place_of(member.member_id)
    draft.remove_member(member.member_id, ending, steps)
    member_gone(draft, member.identity.host)
    who = named(member.identity, rank)
    attributes = {
        "ending": ending,
        "detail": detail,
        "rank": "" if rank is None else str(rank),
        "who": who,
    }
    draft.records.append(
        Record(
            kind=kind, generation=draft.number, member_id=member.member_id, attributes=attributes
        )
    )
    if draft.in_phase(MemberPhase.QUARANTINED):
        _release_quarantined(draft, member.member_id)


def _release_quarantined(draft: Draft, member_id: str) -> None:
    for kept_out in [
        m
        for m in draft.members.values()
        if m.phase is MemberPhase.QUARANTINED and m.apart_from == member_id
    ]:
        _release(draft, kept_out)


def reached_again(draft: Draft) -> None:
    """Makes quarantined members READY again once they can reach their peers, so that they can get a
    rank at the next step boundary."""
    if draft.in_phase(MemberPhase.QUARANTINED) == 0:
        return
    for kept_out in [m for m in draft.members.values() if m.phase is MemberPhase.QUARANTINED]:
        pulse = draft.pulse(kept_out.member_id)
        if (
            pulse is not None
            and pulse.progress.in_reach
            and draft.now.ms >= draft.kept_out_until_ms.get(kept_out.member_id, 0)
        ):
            draft.reasons.append(f"member {kept_out.member_id} can reach its peers again")
            _release(draft, kept_out)


def _release(draft: Draft, kept_out: Member) -> None:
    draft.last_order += 1
    draft.put_member(
        replace(
            kept_out,
            phase=MemberPhase.READY,
            ready_order=draft.last_order,
            reason="",
            apart_from="",
        )
    )
    draft.kept_out_until_ms = {
        name: ms for name, ms in draft.kept_out_until_ms.items() if name != kept_out.member_id
    }
    draft.unplaced[kept_out.member_id] = None


def _is_missed(draft: Draft, member: Member) -> bool:
    """Returns whether other members may be working in a process group with this member."""
    if has_place(draft, member):
        return True
    if member.works_in == 0 or draft.generation is None:
        return False
    # A generation without this member has been written; members that have not adopted it are still
    # in the older process group.
    return any(
        draft.works_in(rank.member_id) < draft.number
        for rank in draft.generation.ranks
        if rank.member_id in draft.members
    )


def _member_or_rank(draft: Draft, event: DrainRequested) -> Member:
    if event.member_id is not None:
        return live_member(draft, event.member_id)
    generation, rank = draft.generation, event.rank
    if generation is not None and rank is not None and 0 <= rank < len(generation.ranks):
        member = draft.members.get(generation.ranks[rank].member_id)
        if member is not None and member.phase in (MemberPhase.RANKED, MemberPhase.DRAINING):
            return member
    size = 0 if generation is None else len(generation.ranks)
    there = (
        f"its newest generation has {size} ranks"
        if size
        else "no rank is assigned yet, since its workers are still starting"
    )
    raise UnknownResourceError(
        f"job {draft.spec.job_id} has no live member with rank {rank}: {there}",
        reason=Refusal.MEMBER_UNKNOWN,
    )
