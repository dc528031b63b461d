"""Collectives that failed: waiting a moment for the death behind them, and what to do if there was
none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

from shoal_common.errors import InvalidRequestError

from shoal_coordinator.membership.draft import Draft
from shoal_coordinator.membership.effects import Record, SendStop
from shoal_coordinator.membership.events import CollectiveFailed, Ending, MemberLost
from shoal_coordinator.membership.forming import holds_state, named
from shoal_coordinator.membership.joining import finished_steps, has_place, live_member
from shoal_coordinator.membership.leaving import member_lost
from shoal_coordinator.membership.pulse import Pulse
from shoal_coordinator.membership.reasons import Refusal
from shoal_coordinator.membership.state import (
    FailureReport,
    Incident,
    JobPhase,
    Member,
    MemberPhase,
    Pair,
)


def collective_failed(draft: Draft, event: CollectiveFailed) -> None:
    """A member's collective failed. If the generation that follows from it is written already, this
    is no news.

    Otherwise an incident is opened: a death that explains it is noticed within the settle time, by
    its stream or its launcher, and ends the incident with a generation. If none is, `incident_due`
    decides.
    """
    member = live_member(draft, event.member_id)
    if event.generation > draft.number:
        # who knows of a generation that Redis has lost says so when it joins
        raise InvalidRequestError(
            f"collective_failure.generation={event.generation}: the newest generation of job "
            f"{draft.spec.job_id} is {draft.number}",
            reason=Refusal.GENERATION_UNKNOWN,
        )
    if draft.phase is JobPhase.FINISHED or draft.departing:
        # A peer has left at the common end: all had confirmed the last step by then.
        draft.effects.append(_over(draft, event.member_id))
        return
    generation = draft.generation
    if (
        generation is None
        or not has_place(draft, member)
        or event.generation < generation.interrupts_below
    ):
        draft.reasons.append(
            f"collective failure of {event.member_id} in generation {event.generation} ignored: "
            "that is over"
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
    # It may be the last report that was waited for.
    due_ms = min(draft.incident.due_ms, draft.now.ms + _settle_ms(draft))
    newest = max(event.generation, draft.incident.generation)
    draft.incident = replace(
        draft.incident,
        generation=newest,
        due_ms=due_ms,
        reports={**draft.incident.reports, event.member_id: report},
    )


def incident_moot(draft: Draft) -> None:
    """The job is over, so no generation will follow for those that wait for one."""
    if draft.incident is not None:
        for member_id in sorted(draft.incident.reports.keys() & draft.members.keys()):
            draft.effects.append(_over(draft, member_id))
    draft.incident = None


def _over(draft: Draft, member_id: str) -> SendStop:
    """Tells a member that waits for a generation that none comes."""
    steps = finished_steps(draft) if draft.phase is JobPhase.FINISHED else 0
    return SendStop(member_id=member_id, reason=draft.stop_reason, now=True, finished_steps=steps)


def incident_due(draft: Draft) -> None:
    """No death has explained a failed collective: put out who is stuck, keep apart two that cannot
    reach each other, re-form.

    A member that timed-out peers wait for is given until it has made no progress for
    stall_timeout_ms; everyone waits for that. So are members that only wait too: the end of the
    first one's group ends theirs, and they report within Policy.timeout_settle_ms.
    """
    incident = draft.incident
    if incident is None or draft.broken or draft.now.ms < incident.due_ms:
        return
    if _is_past(draft, incident):
        draft.reasons.append(
            f"collective failure in generation {incident.generation} is over: all work in "
            f"generation {draft.number}"
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
        # Looked at again with each heartbeat: it may move.
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
            f"a collective failed at {len(incident.reports)} members ({reporters}), and none of "
            "them died"
        )


def _away(draft: Draft, incident: Incident) -> dict[str, int]:
    """Members of the group without a stream, who have said nothing, and since when: one of them may
    be what the others miss."""
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
    """After a fault of the network, or a restart of the coordinator, the others cannot go on
    without those that do not come back."""
    gone = [
        member_id
        for member_id, since_ms in away.items()
        if draft.now.ms >= since_ms + draft.policy.reconnect_ms
    ]
    for member_id in gone:
        detail = (
            "its session's stream broke, it did not come back for "
            f"{draft.policy.reconnect_ms} ms, and its peers' collective failed"
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
    """All members work in a generation that was written since."""
    generation = draft.generation
    if generation is None or incident.generation >= generation.number:
        return False
    return all(draft.works_in(rank.member_id) >= generation.number for rank in generation.ranks)


def stuck_members(draft: Draft, incident: Incident) -> list[tuple[str, int]]:
    """Members that peers timed out on, that reported nothing themselves and have not moved since;
    and until when they are waited for.

    Each is judged by its own past: counts of progress begin with the process, so those of two
    members say nothing of who is ahead. One that is out of a peer's reach, and is not heard of here
    either, is on a machine that was lost.
    """
    timed_out = [report for report in incident.reports.values() if report.timed_out]
    if not timed_out or draft.generation is None:
        return []
    if all(report.suspects for report in timed_out):
        accused: Iterable[str] = sorted(
            frozenset().union(*(report.suspects for report in timed_out))
        )
    else:
        # Who joins with a generation that was written since was not in the one that failed.
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
    """Counts accusations; of two members that accused each other too often, the higher rank is kept
    out."""
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
    """Ranks mean members only in the generation they were given in; of older ones the coordinator
    keeps no record."""
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
