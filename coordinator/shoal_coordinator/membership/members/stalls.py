"""Explains stalled steps: tells all members which member is waiting for which, before any member is
evicted. Evicts members in the two cases that the coordinator can decide: hung members, and members
on lost machines.

Each heartbeat reports whether the member's training thread is waiting for its peers, since when,
and which peers it cannot reach. Either some members are waiting for others that are not waiting, or
all are waiting because a connection between two of them is broken. Members that only report broken
connections to each other abort their group themselves and report the failure (failures.py).

Members that lease their batches (async_sgd) do not always wait for each other. A member that hangs
with leased batches is therefore named even while the others continue to train. It is evicted only
once they wait for it, at the end of the epoch or at their staleness bound.

If all members hang, for example because a file server does not respond, none of them waits for
another. They are all named, and none is evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from shoal_coordinator.membership.members.failures import stuck_members
from shoal_coordinator.membership.members.leaving import member_lost
from shoal_coordinator.membership.members.readmission import is_recovering
from shoal_coordinator.membership.members.stragglers import (
    Report,
    behind_connection,
    find_stragglers,
)
from shoal_coordinator.membership.model.draft import Draft
from shoal_coordinator.membership.model.effects import Record, SendNotice, SilentMember
from shoal_coordinator.membership.model.events import Ending, MemberLost
from shoal_coordinator.membership.model.pulse import Pulse
from shoal_coordinator.membership.model.state import Generation, JobPhase, Stall

_MOST_NAMED: Final = 4
_AT: Final = ", which is at "
_SURELY_WAITS_MS: Final = 1_000
"""A member counts as waiting if it had been waiting at least this long at its last heartbeat;
shorter waits are part of a normal step."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank of the newest generation, as described by its last heartbeat."""

    rank: int
    member_id: str
    host: str
    pulse: Pulse
    silent_ms: int
    waited_ms: int
    """Duration in milliseconds of the rank's current wait for its peers of this generation."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host})"


def stalls_due(draft: Draft) -> None:
    """Evicts hung members and members on lost machines, and explains a stalled step. If no step is
    stalled, names stragglers. Acts at most once per `look_ms`."""
    generation = draft.generation
    if draft.looked_ms is not None and draft.now.ms < draft.looked_ms + draft.policy.look_ms:
        return
    draft.looked_ms = draft.now.ms
    if (
        generation is None
        or draft.broken
        or is_recovering(draft)
        or draft.phase not in (JobPhase.RUNNING, JobPhase.STOPPING)
    ):
        _notify(draft, generation, "")
        return
    places = _places(draft, generation)
    _evict_hung(draft, places)
    if draft.broken:
        _notify(draft, generation, "")
        return
    reach = _out_of_reach(places)
    text = (
        _explain_incident(draft, places)
        if draft.incident is not None
        else _explain(draft, places, reach)
    )
    silent = _silent_members(draft, places) if text else ()
    _notify(draft, generation, text, reach, silent)
    if not text:
        find_stragglers(draft, generation)


def _places(draft: Draft, generation: Generation) -> list[Place]:
    return [
        Place(
            rank=position,
            member_id=rank.member_id,
            host=rank.host,
            pulse=pulse,
            silent_ms=pulse.silent_ms(draft.now.ms),
            waited_ms=draft.waited_ms(pulse),
        )
        for position, rank in enumerate(generation.ranks)
        if (pulse := draft.pulse(rank.member_id)) is not None
    ]


def _divide(draft: Draft, places: Iterable[Place]) -> tuple[list[Place], list[Place], list[Place]]:
    """Returns three lists of ranks: waiting, working, and silent."""
    waiting, working, silent = [], [], []
    for place in places:
        if place.silent_ms > draft.spec.unheard_ms:
            silent.append(place)
        elif place.waited_ms >= _SURELY_WAITS_MS:
            waiting.append(place)
        else:
            working.append(place)
    return waiting, working, silent


def _evict_hung(draft: Draft, places: Sequence[Place]) -> None:
    waiting, working, silent = _divide(draft, places)
    if not waiting:
        return
    stall_ms, now_ms = draft.spec.stall_timeout_ms, draft.now.ms
    waited_ms = min(place.waited_ms for place in waiting)
    if working and waited_ms >= stall_ms - draft.spec.unheard_ms:
        for place in working:
            if place.pulse.progress.server_wait_s:
                continue  # waits for a parameter server, with a separate deadline
            if now_ms - place.pulse.active_ms > stall_ms and place.pulse.progress.cpu_s > 0:
                detail = (
                    f"no progress and no CPU time for {stall_ms} ms, while all others waited for it"
                )
                member_lost(
                    draft,
                    MemberLost(member_id=place.member_id, ending=Ending.STALLED, detail=detail),
                )
    if working:
        return
    for place in silent:
        by = [other for other in waiting if place.rank in other.pulse.progress.out_of_reach]
        if by and place.silent_ms > draft.policy.reconnect_ms:
            detail = (
                f"no heartbeat for {place.silent_ms} ms, and {by[0].name}, which is waiting for "
                "it, cannot reach it"
            )
            member_lost(
                draft,
                MemberLost(member_id=place.member_id, ending=Ending.LEASE_EXPIRED, detail=detail),
            )


def _explain(draft: Draft, places: Sequence[Place], reach: str) -> str:
    """Returns an explanation of the stalled step, or of hung members while no step is stalled;
    empty if there is neither. `reach`: text about members that cannot reach each other."""
    waiting, working, silent = _divide(draft, places)
    waited_ms = max((place.waited_ms for place in waiting), default=0)
    if waited_ms < draft.policy.explain_after_ms:
        return _explain_hung(draft, places, working, silent)
    longest = max(waiting, key=lambda place: place.waited_ms)
    step = max(place.pulse.progress.step for place in places)
    waited = f"waited {waited_ms // 1000} s in {longest.pulse.progress.waiting_in}"
    head = f"generation {draft.number} has stalled at step {step}: {_names(waiting)} {waited}"
    if not working and not silent:
        _, slow = behind_connection(
            [
                Report(rank=p.rank, member_id=p.member_id, host=p.host, progress=p.pulse.progress)
                for p in places
            ]
        )
        why = reach or (f"; {slow}" if slow else "; none has reported that it cannot reach another")
        return (
            f"{head}, all at the same time, so the network between them is slow or lost a "
            f"message{why}"
        )
    return f"{head} for {_blamed(draft, working, silent, ' and for ')}{reach}"


def _explain_hung(
    draft: Draft, places: Sequence[Place], working: Sequence[Place], silent: Sequence[Place]
) -> str:
    """Returns a description of members that hang although no member waits for them; empty if there
    are none. Either such members have leased batches, or all members hang at the same time, for
    example because a file server does not respond. A member that is using the processor may be
    evaluating or saving a checkpoint. It is therefore named only if it has leased batches, other
    members continue to train and it has made no progress for stall_timeout_ms."""
    leased, now_ms, policy = draft.count_loaders() > 0, draft.now.ms, draft.policy
    moves = [p for p in working if now_ms - p.pulse.moved_ms < policy.explain_after_ms]
    quiet = [p for p in silent if p.silent_ms >= policy.explain_after_ms]
    stuck = [
        p
        for p in working
        if p not in moves
        and not p.pulse.progress.server_wait_s
        and p.pulse.progress.cpu_s > 0
        and (
            now_ms - p.pulse.active_ms >= policy.explain_after_ms
            or (moves and now_ms - p.pulse.moved_ms >= draft.spec.stall_timeout_ms)
        )
    ]
    if leased:
        quiet, stuck = (
            [p for p in named if draft.holds_batches(p.member_id)] for named in (quiet, stuck)
        )
    elif not stuck or len(places) < 2 or len(quiet) + len(stuck) < len(places):
        # if only some members hang, the others will soon wait for them; a member without peers may
        # be waiting for its user
        return ""
    if not quiet and not stuck:
        return ""
    blamed = _blamed(draft, stuck, quiet, " and ")
    if moves:
        return f"generation {draft.number} trains on without {blamed}"
    return f"no rank of generation {draft.number} makes progress: {blamed}"


def _blamed(draft: Draft, working: Sequence[Place], silent: Sequence[Place], joined: str) -> str:
    """Describes what silent and working members are doing. `joined`: text between two members."""
    blamed = [
        f"{place.name}, no heartbeat for {place.silent_ms // 1000} s"
        + (f"{_AT}{line}" if (line := place.pulse.progress.script_line) else "")
        for place in silent[:_MOST_NAMED]
    ]
    blamed += [
        f"{place.name}{_what_it_does(draft, place)}"
        for place in working[: max(0, _MOST_NAMED - len(blamed))]
    ]
    more = len(silent) + len(working) - len(blamed)
    return f"{joined.join(blamed)}{f' and {more} more' if more else ''}"


def _silent_members(draft: Draft, places: Sequence[Place]) -> tuple[SilentMember, ...]:
    """Returns the silent members whose stacks can be read by another member on the same machine."""
    _, _, silent = _divide(draft, places)
    if not silent:
        return ()
    readers: dict[str, str] = {}
    for place in places:
        if place not in silent:
            readers.setdefault(place.host, place.member_id)
    return tuple(
        SilentMember(
            member_id=place.member_id,
            pid=identity.pid,
            read_by=readers[place.host],
            logs=identity.local_index == 0,
        )
        for place in silent[:_MOST_NAMED]
        if place.host in readers
        and (identity := draft.members[place.member_id].identity) is not None
    )


def _what_it_does(draft: Draft, place: Place) -> str:
    still_s, idle_s = (
        (draft.now.ms - place.pulse.moved_ms) // 1000,
        (draft.now.ms - place.pulse.active_ms) // 1000,
    )
    if place.pulse.generation < draft.number:
        return f", which is still in generation {place.pulse.generation}"
    if (waited_s := int(place.pulse.progress.server_wait_s)) > 0:
        return f", which has waited {waited_s} s for {place.pulse.progress.awaited_server}"
    idle = (
        f" and no CPU time for {idle_s} s" if idle_s >= 5 and place.pulse.progress.cpu_s > 0 else ""
    )
    where = place.pulse.progress.script_line
    what = f"{_AT}{where}" if where else ", which is running its own code"
    return f"{what}, with no progress for {still_s} s{idle}"


def _out_of_reach(places: Sequence[Place]) -> str:
    by_rank = {place.rank: place for place in places}
    pairs = [
        (place, by_rank[rank])
        for place in places
        for rank in place.pulse.progress.out_of_reach
        if rank in by_rank
    ]
    named = [f"{one.name} cannot reach {other.name}" for one, other in pairs[:_MOST_NAMED]]
    return f"; {', '.join(named)}" if named else ""


def _explain_incident(draft: Draft, places: Sequence[Place]) -> str:
    incident = draft.incident
    if incident is None or draft.now.ms < incident.opened_ms + draft.policy.reconnect_ms:
        return ""
    reporters = [place for place in places if place.member_id in incident.reports]
    waited_for = dict(stuck_members(draft, incident))
    stuck = [place for place in places if place.member_id in waited_for][:_MOST_NAMED]
    named = [
        f"{place.name}, to be evicted in "
        f"{max(0, waited_for[place.member_id] - draft.now.ms) // 1000} s unless it makes progress"
        for place in stuck
    ]
    return (
        f"a collective failed, and {_names(reporters)} waited for "
        f"{' and for '.join(named) or 'members that have not returned'}"
    )


def _names(places: Sequence[Place]) -> str:
    named = ", ".join(place.name for place in places[:_MOST_NAMED])
    more = len(places) - _MOST_NAMED
    return (
        f"{named}{f' and {more} more' if more > 0 else ''} {'have' if len(places) > 1 else 'has'}"
    )


def _notify(
    draft: Draft,
    generation: Generation | None,
    text: str,
    reach: str = "",
    silent: Sequence[SilentMember] = (),
) -> None:
    """Announces why a step is stalled, in the log and to all members of the generation; at the
    beginning of a stall also in the event log. Repeats an explanation only after
    Policy.explain_again_ms, unless it contains news. An empty `text` means that no step is stalled
    any more."""
    before = draft.stall
    if generation is None or (not text and before is None):
        draft.stall = None
        return
    located = text.count(_AT)
    news = before is None or (reach and not before.reach) or located > before.located
    if (
        text
        and before is not None
        and not news
        and draft.now.ms < before.reported_ms + draft.policy.explain_again_ms
    ):
        return
    draft.stall = (
        Stall(
            text=text,
            reach=reach,
            reported_ms=draft.now.ms,
            located=located,
            readers={each.member_id: each.read_by for each in silent},
        )
        if text
        else None
    )
    draft.effects.append(SendNotice(generation=generation, text=text, silent=silent))
    if text:
        draft.reasons.append(text)
    if text and before is None:
        draft.records.append(
            Record(kind="step_stands", generation=draft.number, attributes={"reason": text})
        )
