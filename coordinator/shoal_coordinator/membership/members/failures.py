"""Handles failed collectives: waits briefly for the report of a death that explains the failure,
and acts if there is none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

from shoal_common.errors import InvalidRequestError

from shoal_coordinator.membership.members.forming import holds_state, named
from shoal_coordinator.membership.members.joining import finished_steps, has_place, live_member
from shoal_coordinator.membership.members.leaving import member_lost
from shoal_coordinator.membership.model.draft import Draft
from shoal_coordinator.membership.model.effects import Record, SendStop
from shoal_coordinator.membership.model.events import CollectiveFailed, Ending, MemberLost
from shoal_coordinator.membership.model.pulse import Pulse
from shoal_coordinator.membership.model.reasons import Refusal
from shoal_coordinator.membership.model.state import (
    FailureReport,
    Incident,
    JobPhase,
    Member,
    MemberPhase,
    Pair,
)


def collective_failed(draft: Draft, event: CollectiveFailed) -> None:
    """Records that a collective failed on a member. Ignores a failure in a generation that has been
    replaced.

    Otherwise opens an incident. If a death explains the failure, a closed stream or a launcher
    reveals it within the settle time, and a new generation closes the incident. If not,
    `incident_due` decides."""
    member = live_member(draft, event.member_id)
    if event.generation > draft.number:
        # A member that knows a generation lost by Redis reports it when it joins, not here.
        raise InvalidRequestError(
            f"collective_failure.generation={event.generation}: expected at most {draft.number}, "
            f"the newest generation of job {draft.spec.job_id}",
            reason=Refusal.GENERATION_UNKNOWN,
        )
    if _has_ended(draft):
        # A peer has left after the last step, which all members had confirmed by then.
        draft.effects.append(_over(draft, event.member_id))
        return
    generation = draft.generation
    if (
        generation is None
        or not has_place(draft, member)
        or event.generation < generation.interrupts_below
    ):
        draft.reasons.append(
            f"ignored a collective failure of {event.member_id} in generation {event.generation}, "
            "which has ended"
        )
        return
    suspects = _members_of_ranks(draft, event) - {event.member_id}
    report = FailureReport(suspects=suspects, timed_out=event.timed_out)
    draft.records.append(
        Record(
            kind="collective_failed",
            generation=event.generation,
            member_id=event.member_id,
            attributes={
                "timed_out": str(event.timed_out).lower(),
                "suspects": " ".join(sorted(suspects)),
                "detail": event.detail,
            },
        )
    )
    if draft.incident is None:
        due_ms = draft.now.ms + _settle_ms(draft)
        draft.incident = Incident(
            generation=event.generation, opened_ms=draft.now.ms, due_ms=due_ms, reports={}
        )
    # This may be the last report needed to resolve the incident.
    due_ms = min(draft.incident.due_ms, draft.now.ms + _settle_ms(draft))
    newest = max(event.generation, draft.incident.generation)
    draft.incident = replace(
        draft.incident,
        generation=newest,
        due_ms=due_ms,
        reports={**draft.incident.reports, event.member_id: report},
    )


def _has_ended(draft: Draft) -> bool:
    """Returns whether the job has ended, or members have left after its last step. In both cases no
    further generation is formed, so a failed collective needs no decision."""
    return draft.phase is JobPhase.FINISHED or draft.departing


def incident_moot(draft: Draft) -> None:
    """Closes the incident of a job that has finished, and notifies the members that reported it
    that no generation will follow."""
    if draft.incident is not None:
        for member_id in sorted(draft.incident.reports.keys() & draft.members.keys()):
            draft.effects.append(_over(draft, member_id))
    draft.incident = None


def _over(draft: Draft, member_id: str) -> SendStop:
    """Returns the message that tells a waiting member that no further generation will follow."""
    steps = finished_steps(draft) if draft.phase is JobPhase.FINISHED else None
    return SendStop(member_id=member_id, reason=draft.stop_reason, now=True, finished_steps=steps)


def incident_due(draft: Draft) -> None:
    """Handles an incident that no death has explained: evicts stuck members, quarantines one of two
    members that cannot reach each other, and forms a new generation.

    A member that its peers were waiting for when they timed out is evicted once it has made no
    progress for stall_timeout_ms; the incident stays open until then, and for at least
    Policy.timeout_settle_ms. Members that are themselves only waiting need this time to report,
    because their groups are aborted only after the group of the first reporter.
    """
    incident = draft.incident
    if incident is None or draft.broken or _has_ended(draft) or draft.now.ms < incident.due_ms:
        return
    if _is_past(draft, incident):
        draft.reasons.append(
            f"collective failure in generation {incident.generation} is resolved: all members are "
            f"in generation {draft.number}"
        )
        draft.incident = None
        return
    if away := _away(draft, incident):
        _await_return(draft, incident, away)
        return
    stuck = stuck_members(draft, incident)
    earliest_ms = incident.opened_ms + draft.policy.timeout_settle_ms
    stalled = [m for m, given_up_ms in stuck if draft.now.ms >= max(earliest_ms, given_up_ms)]
    if stuck and not stalled:
        # Checked again with each heartbeat, since the member may make progress.
        decided_ms = max(earliest_ms, min(given_up_ms for _, given_up_ms in stuck))
        draft.incident = replace(
            incident, due_ms=min(decided_ms, draft.now.ms + draft.spec.heartbeat_interval_ms)
        )
        return
    draft.incident = None
    for member_id in stalled:
        moved_ms = pulse.moved_ms if (pulse := draft.pulse(member_id)) is not None else draft.now.ms
        detail = (
            f"no progress for {draft.now.ms - moved_ms} ms while its peers waited in a collective"
        )
        member_lost(draft, MemberLost(member_id=member_id, ending=Ending.STALLED, detail=detail))
    if not stalled:
        _quarantine(draft, _mutual_accusations(incident))
        draft.fresh_failures = draft.fresh_failures + 1 if _is_fresh(draft) else 0
        reporters = ", ".join(sorted(incident.reports)[:3]) + (
            ", ..." if len(incident.reports) > 3 else ""
        )
        draft.broken.append(
            f"a collective failed on {len(incident.reports)} members ({reporters}), but none of "
            "them died"
        )


def _away(draft: Draft, incident: Incident) -> dict[str, int]:
    """Returns the members of the failed group that have no open stream and have not reported the
    failure: member id -> time when its stream closed. One of them may be the cause."""
    ranks = () if draft.generation is None else draft.generation.ranks
    pulses = {
        rank.member_id: draft.pulse(rank.member_id)
        for rank in ranks
        if rank.member_id not in incident.reports
    }
    return {
        member_id: pulse.detached_ms
        for member_id, pulse in pulses.items()
        if pulse is not None and pulse.detached_ms is not None
    }


def _await_return(draft: Draft, incident: Incident, away: dict[str, int]) -> None:
    """Evicts members that have not reconnected in time after a network failure or a restart of the
    coordinator, because the other members cannot continue without them."""
    gone = [
        member_id
        for member_id, since_ms in away.items()
        if draft.now.ms >= since_ms + draft.policy.reconnect_ms
    ]
    for member_id in gone:
        detail = (
            f"its session's stream broke, it did not reconnect within {draft.policy.reconnect_ms} "
            "ms, and its peers' collective failed"
        )
        member_lost(
            draft, MemberLost(member_id=member_id, ending=Ending.STREAM_BROKEN, detail=detail)
        )
    if not gone:
        returned_ms = min(away.values()) + draft.policy.reconnect_ms
        draft.incident = replace(
            incident, due_ms=min(returned_ms, draft.now.ms + draft.spec.heartbeat_interval_ms)
        )


def _is_past(draft: Draft, incident: Incident) -> bool:
    """Returns whether every member is already working in a generation newer than the incident's."""
    generation = draft.generation
    if generation is None or incident.generation >= generation.number:
        return False
    return all(draft.works_in(rank.member_id) >= generation.number for rank in generation.ranks)


def stuck_members(draft: Draft, incident: Incident) -> list[tuple[str, int]]:
    """Returns the members that the timed-out members were waiting for. Omits members that have
    reported the failure themselves or have made progress since then. Each result is a pair: the
    member's id, and the time until which the incident stays open for this member.

    A member is judged by its own history. Progress counters start with the process, so comparing
    two members does not show which one is ahead. If neither its peers nor the coordinator can reach
    a member, its machine is assumed to be lost.
    """
    timed_out = [report for report in incident.reports.values() if report.timed_out]
    if not timed_out or draft.generation is None:
        return []
    if all(report.suspects for report in timed_out):
        accused: Iterable[str] = sorted(
            frozenset().union(*(report.suspects for report in timed_out))
        )
    else:
        # A member that joined with a later generation was not in the failed generation.
        later = incident.generation < draft.generation.number
        accused = [
            rank.member_id for rank in draft.generation.ranks if not (later and rank.joining)
        ]
    named = frozenset().union(*(report.suspects for report in timed_out))
    return [
        (
            member_id,
            min(
                _given_up_ms(draft, pulse, member_id in named),
                pulse.moved_ms + draft.spec.stall_timeout_ms,
            ),
        )
        for member_id in accused
        if member_id not in incident.reports
        and (pulse := draft.pulse(member_id)) is not None
        and pulse.moved_ms <= incident.opened_ms
    ]


def _given_up_ms(draft: Draft, pulse: Pulse, out_of_reach: bool) -> int:
    lost = out_of_reach and pulse.silent_ms(draft.now.ms) > draft.spec.unheard_ms
    return (
        pulse.heard_ms + draft.policy.reconnect_ms
        if lost
        else pulse.moved_ms + draft.spec.stall_timeout_ms
    )


def _mutual_accusations(incident: Incident) -> list[Pair]:
    accusing = {
        member_id: report.suspects
        for member_id, report in incident.reports.items()
        if report.suspects
    }
    return [
        (a, b)
        for a, b in combinations(sorted(accusing), 2)
        if b in accusing[a] and a in accusing[b]
    ]


def _quarantine(draft: Draft, pairs: list[Pair]) -> None:
    """Counts how often each pair of members has accused each other of being unreachable. When a
    pair reaches the limit, quarantines the member with the higher rank."""
    for pair in pairs:
        count = draft.accusations.get(pair, 0) + 1
        draft.accusations = {**draft.accusations, pair: count}
        if count < draft.policy.quarantine_after:
            continue
        first, second = (draft.members.get(member_id) for member_id in pair)
        if (
            first is None
            or second is None
            or not (has_place(draft, first) and has_place(draft, second))
        ):
            continue
        kept_out, other = _higher_rank_first(draft, first, second)
        reason = f"it and {other.member_id} accused each other {count} times"
        held, rank = holds_state(draft, kept_out), draft.place_of(kept_out.member_id)
        draft.put_member(
            replace(
                kept_out,
                phase=MemberPhase.QUARANTINED,
                reason=reason,
                apart_from=other.member_id,
                holds_state=held,
            )
        )
        draft.unplaced[kept_out.member_id] = None
        longest_ms = draft.policy.kept_out_ms << min(count - draft.policy.quarantine_after, 16)
        until_ms = draft.now.ms + min(longest_ms, draft.policy.longest_kept_out_ms)
        draft.kept_out_until_ms = {**draft.kept_out_until_ms, kept_out.member_id: until_ms}
        attributes = {
            "reason": reason,
            "rank": "" if rank is None else str(rank),
            "who": named(kept_out.identity, rank),
        }
        draft.records.append(
            Record(
                kind="member_quarantined",
                generation=draft.number,
                member_id=kept_out.member_id,
                attributes=attributes,
            )
        )


def _higher_rank_first(draft: Draft, first: Member, second: Member) -> tuple[Member, Member]:
    higher = (draft.place_of(first.member_id) or 0) > (draft.place_of(second.member_id) or 0)
    return (first, second) if higher else (second, first)


def _members_of_ranks(draft: Draft, event: CollectiveFailed) -> frozenset[str]:
    """Returns the ids of the members with the suspected ranks. The result is empty if the report is
    about an older generation: ranks identify members only within a generation, and older rank
    tables are not kept."""
    generation = draft.generation
    if generation is None or event.generation != generation.number:
        return frozenset()
    return frozenset(
        generation.ranks[rank].member_id for rank in event.suspects if rank < len(generation.ranks)
    )


def _settle_ms(draft: Draft) -> int:
    return min(
        draft.policy.settle_ms << min(draft.fresh_failures, 16), draft.policy.longest_settle_ms
    )


def _is_fresh(draft: Draft) -> bool:
    return (
        draft.formed_ms is not None
        and draft.now.ms < draft.formed_ms + draft.policy.fresh_generation_ms
    )
