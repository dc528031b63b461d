"""Readmits members of generations that Redis has lost, whether Redis has lost its latest writes or
all of its data.

The members continue in the newest generation that any of them reports. Only the coordinator's
record of this generation is lost. The generation itself is still valid, because only one list of
members was ever announced under its number and nonce. New generations therefore get higher numbers,
and a returning member is assumed to hold state whether or not it is on record. Once all members
have returned, one generation is written for them.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_coordinator.membership.model.draft import Draft
from shoal_coordinator.membership.model.effects import Record
from shoal_coordinator.membership.model.events import MemberJoined
from shoal_coordinator.membership.model.state import Member, MemberPhase, Recovery


def knows_of_lost(draft: Draft, event: MemberJoined) -> bool:
    """Returns whether the member worked in a generation that Redis has lost. If so, makes sure that
    new generations get numbers above it."""
    reported, recovery = event.last_generation, draft.recovery
    if reported <= draft.number:
        return recovery is not None and reported > recovery.known
    known = draft.number if recovery is None else recovery.known
    draft.recovery = Recovery(
        known=known,
        newest=reported,
        world_size=event.last_world_size,
        until_ms=draft.now.ms + draft.spec.lease_ms,
    )
    draft.number = reported
    reason = (
        f"Redis lost generations {known + 1} to {reported}; the next generation gets a number "
        "above them"
    )
    draft.reasons.append(reason)
    draft.records.append(
        Record(
            kind="generations_lost",
            generation=reported,
            member_id=event.identity.member_id,
            attributes={"reason": reason},
        )
    )
    return True


def continue_recovery(draft: Draft) -> None:
    """Continues a recovery that was in progress when the coordinator was restarted. Members get
    another lease duration to return."""
    recovery = draft.recovery
    if recovery is not None and recovery.until_ms == Recovery.FOUND:
        draft.recovery = replace(recovery, until_ms=draft.now.ms + draft.spec.lease_ms)


def readmit(draft: Draft, event: MemberJoined) -> None:
    """Readmits a member that worked in a generation that Redis has lost. The member holds part of
    the state and gets its rank with the next generation."""
    draft.last_order += 1
    member = Member(
        identity=event.identity,
        phase=MemberPhase.READY,
        joined_unix_ms=draft.now.unix_ms,
        replays=False,
        ready_order=draft.last_order,
        holds_state=True,
    )
    draft.put_member(member)
    draft.records.append(
        Record(
            kind="member_joined",
            member_id=member.member_id,
            attributes={"host": event.identity.host},
        )
    )


def is_recovering(draft: Draft) -> bool:
    """Returns whether the job is still waiting for members of lost generations to return. Until
    then, no generation may be formed."""
    return draft.recovery is not None and draft.recovery.until_ms is not None


def recovery_due(draft: Draft) -> None:
    """Forms one generation for the members that have returned, once all ranks of the newest lost
    generation have returned or one lease duration has passed."""
    recovery = draft.recovery
    if recovery is None or recovery.until_ms is None:
        return
    with_state = [
        member
        for member in draft.members.values()
        if member.phase is MemberPhase.RANKED or member.holds_state
    ]
    back = sum(
        (pulse := draft.pulse(member.member_id)) is not None and pulse.attached
        for member in with_state
    )
    all_back = back == len(with_state) and 0 < recovery.world_size <= back
    if not all_back and draft.now.ms < recovery.until_ms:
        return
    draft.recovery = replace(recovery, until_ms=None)
    of = f" of {recovery.world_size}" if recovery.world_size else ""
    draft.broken.append(
        f"Redis lost generation {recovery.newest}, and {back}{of} of its ranks have reconnected"
    )
