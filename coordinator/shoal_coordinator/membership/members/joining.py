"""Rules for new members, reconnecting members, and members that request a rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from shoal_common.errors import (
    InvalidRequestError,
    LimitError,
    PermissionDeniedError,
    PreconditionError,
    StaleGenerationError,
    UnknownResourceError,
)

from shoal_coordinator.membership.members.machines import check_machine
from shoal_coordinator.membership.members.readmission import knows_of_lost, readmit
from shoal_coordinator.membership.model.draft import Draft
from shoal_coordinator.membership.model.effects import Record, SendDrain, SendGeneration, SendStop
from shoal_coordinator.membership.model.events import LeaveReason, MemberJoined, MemberReady
from shoal_coordinator.membership.model.reasons import Refusal
from shoal_coordinator.membership.model.state import JobPhase, Member, MemberPhase

FEW_READY: Final = 100
"""Maximum number of waiting members that are all told immediately why they are waiting, both before
training starts and whenever the reason changes."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Outcome of a MemberJoined event."""

    replays: bool
    """Value of shoal.v1.Welcome.joining: True if the member joins a job that already has a
    generation."""
    resumed: bool
    """True if the process was already a member, and therefore keeps its rank or its position among
    the waiting members."""


def member_joined(draft: Draft, event: MemberJoined) -> Joined:
    """Admits the process that has opened a session, as a new or a returning member. Raises an error
    if its id belongs to a former member or a different process, if its machine is refused, or if
    the job accepts no more members."""
    member_id = event.identity.member_id
    if event.last_generation > draft.number + draft.policy.most_lost_generations:
        raise InvalidRequestError(
            f"member {member_id} reports generation {event.last_generation}, but the newest "
            f"generation of job {draft.spec.job_id} is {draft.number}, and Redis cannot have lost "
            "that many; restart the process with a new member_id",
            reason=Refusal.GENERATION_UNKNOWN,
        )
    if member_id in draft.departed:
        raise PreconditionError(
            f"member {member_id} is no longer a member of job {draft.spec.job_id} "
            f"({draft.departed[member_id].ending}); restart the process with a new member_id",
            reason=Refusal.MEMBER_REPLACED,
        )
    member = draft.members.get(member_id)
    if member is not None:
        return _member_resumed(draft, event, member)
    if draft.phase in (JobPhase.WAITING, JobPhase.RUNNING) and knows_of_lost(draft, event):
        readmit(draft, event)
        return Joined(replays=False, resumed=True)
    if event.last_generation > 0:
        raise StaleGenerationError(
            f"member {member_id} was in generation {event.last_generation} of job "
            f"{draft.spec.job_id} but is no longer a member; restart the process with a new "
            "member_id"
        )
    if draft.phase in (JobPhase.STOPPING, JobPhase.FINISHED):
        raise PreconditionError(
            f"run {draft.run} of job {draft.spec.job_id} is {draft.phase} ({draft.stop_reason}) "
            "and accepts no new members; start the next run",
            reason=Refusal.RUN_ENDED,
        )
    if len(draft.members) >= draft.policy.most_members:
        raise LimitError(
            f"job {draft.spec.job_id} already has {len(draft.members)} members, the maximum; stop "
            "some that have no rank",
            reason=Refusal.MEMBERS_LIMIT,
        )
    check_machine(draft, event.identity.host)
    replays = not draft.is_fresh
    draft.put_member(
        Member(
            identity=event.identity,
            phase=MemberPhase.JOINED,
            joined_unix_ms=draft.now.unix_ms,
            replays=replays,
        )
    )
    draft.records.append(
        Record(kind="member_joined", member_id=member_id, attributes={"host": event.identity.host})
    )
    return Joined(replays=replays, resumed=False)


def _member_resumed(draft: Draft, event: MemberJoined, member: Member) -> Joined:
    """Continues the session of a known member on a new stream. Resends everything that the member
    may have missed."""
    before, after = member.identity, event.identity
    if before.key_digest and before.key_digest != after.key_digest:
        raise PermissionDeniedError(
            f"member {after.member_id} of job {draft.spec.job_id} belongs to another process, and "
            "the caller does not have its key; use a separate member_id for each process",
            reason=Refusal.MEMBER_KEY_WRONG,
        )
    if (before.host, before.pid) != (after.host, after.pid):
        raise PreconditionError(
            f"member_id {after.member_id} belongs to process {before.pid} on {before.host}, not "
            f"to process {after.pid} on {after.host}; use a separate id for each process",
            reason=Refusal.MEMBER_CONFLICT,
        )
    knows_of_lost(draft, event)
    if before != after:
        draft.put_member(replace(member, identity=after))
    member_id = member.member_id
    if member.phase is MemberPhase.DRAINING:
        draft.effects.append(SendDrain(member_id=member_id, reason=member.reason))
    generation = draft.generation
    if draft.phase is JobPhase.FINISHED and event.works_in == 0:
        # Its peers finished while it could not be notified.
        stop = SendStop(
            member_id=member_id,
            reason=draft.stop_reason,
            now=True,
            finished_steps=finished_steps(draft),
        )
        draft.effects.append(stop)
        return Joined(replays=member.replays, resumed=True)
    if (
        has_place(draft, member)
        and generation is not None
        and event.last_generation < generation.number
    ):
        draft.effects.append(SendGeneration(member_id=member_id, generation=generation))
    if draft.phase is JobPhase.STOPPING or (
        draft.phase is JobPhase.FINISHED and member.phase is not MemberPhase.RANKED
    ):
        draft.effects.append(stop_for(draft, member))
    elif member.phase in (MemberPhase.READY, MemberPhase.QUARANTINED):
        draft.unplaced[member_id] = None
    return Joined(replays=member.replays, resumed=True)


def member_ready(draft: Draft, event: MemberReady) -> None:
    """Records that a member requests a rank. A repeated request has no effect."""
    member = live_member(draft, event.member_id)
    if member.phase is not MemberPhase.JOINED:
        return
    draft.last_order += 1
    draft.put_member(replace(member, phase=MemberPhase.READY, ready_order=draft.last_order))
    draft.records.append(Record(kind="member_ready", member_id=event.member_id))
    if draft.phase is not JobPhase.WAITING or draft.in_phase(MemberPhase.READY) <= FEW_READY:
        # beyond that number, all waiting members are notified together
        draft.unplaced[event.member_id] = None
    if draft.grace_until_ms is None:
        draft.grace_until_ms = draft.now.ms + draft.spec.join_grace_ms


def has_place(draft: Draft, member: Member) -> bool:
    """Returns whether a member has a rank in the newest generation and has not left that
    generation."""
    if member.phase is MemberPhase.DRAINING:
        return member.works_in == 0 and draft.place_of(member.member_id) is not None
    return member.phase is MemberPhase.RANKED


def stop_for(draft: Draft, member: Member, reason: str | None = None) -> SendStop:
    """Returns the message that tells a member that the job is stopping or has ended. `reason`: None
    means the job's own reason for stopping."""
    now = not has_place(draft, member)
    # The member worked in a generation, and the others have continued without it.
    known = member.holds_state or draft.works_in(member.member_id) > 0
    behind = (
        now
        and known
        and draft.generation is not None
        and draft.place_of(member.member_id) is None
        and not member.works_in
    )
    return SendStop(
        member_id=member.member_id,
        reason=draft.stop_reason if reason is None else reason,
        now=now,
        behind=behind,
    )


def finished_steps(draft: Draft) -> int | None:
    """Returns the number of steps committed by a member that has finished the script; None if no
    member has, or the number is unknown."""
    return max(
        (
            departure.steps
            for departure in draft.departed.values()
            if departure.ending == LeaveReason.FINISHED and departure.steps is not None
        ),
        default=None,
    )


def live_member(draft: Draft, member_id: str) -> Member:
    """Returns the live member with this id. Raises an error that explains why there is none."""
    member = draft.members.get(member_id)
    if member is not None:
        return member
    if member_id in draft.departed:
        raise PreconditionError(
            f"member {member_id} is no longer a member of job {draft.spec.job_id} "
            f"({draft.departed[member_id].ending})",
            reason=Refusal.MEMBER_REPLACED,
        )
    raise UnknownResourceError(
        f"job {draft.spec.job_id} has no member {member_id!r}", reason=Refusal.MEMBER_UNKNOWN
    )
