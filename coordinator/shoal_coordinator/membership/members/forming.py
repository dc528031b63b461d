"""Forms a generation: chooses its members, assigns ranks and updates each member accordingly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from shoal_coordinator.membership.members.joining import has_place
from shoal_coordinator.membership.model.draft import Draft
from shoal_coordinator.membership.model.effects import (
    AnnounceGeneration,
    Record,
    SendMembers,
    SendStop,
)
from shoal_coordinator.membership.model.rank_changes import change_between, changes_to_write
from shoal_coordinator.membership.model.ranks import assign_ranks
from shoal_coordinator.membership.model.state import (
    Cause,
    Generation,
    Identity,
    JobPhase,
    Member,
    MemberPhase,
)

_MOST_NAMED: Final = 8
"""Maximum number of new members that an event lists by name."""


def form(
    draft: Draft, cause: Cause, reason: str, *, joiners: int, draining: Sequence[Member] = ()
) -> None:
    """Forms the next generation in the draft. It consists of all members with a rank, the
    `draining` members, and at most `joiners` ready members: members of the previous generation
    first, then those that have waited longest.

    The caller must have checked that the number of members is between `Draft.fewest_workers` and
    max_workers.
    """
    previous = draft.generation
    survivors, new = _choose(draft, joiners, {member.member_id: member for member in draining})
    draft.number += 1
    before = {} if previous is None else {rank.member_id: rank for rank in previous.ranks}
    ranks = assign_ranks(
        survivors, new, is_joining=lambda member: not holds_state(draft, member), before=before
    )
    change = None if previous is None else change_between(previous, ranks)
    generation = Generation(
        number=draft.number,
        nonce=draft.nonce,
        cause=cause,
        ranks=ranks,
        # A member may miss the interrupting generation and receive only this one.
        interrupts_below=previous.interrupts_below
        if cause is Cause.BORDER and previous is not None
        else draft.number,
        created_unix_ms=draft.now.unix_ms,
        change=change,
        written=changes_to_write(previous, change, draft.number, len(ranks)),
    )
    draft.generation = generation
    draft.formed_ms = draft.now.ms
    draft.grace_until_ms = None
    if cause is not Cause.BORDER:
        draft.incident = None
    if draft.phase is JobPhase.WAITING:
        draft.phase = JobPhase.RUNNING
    _give_ranks(draft, generation)
    _leave_out_draining(draft, generation, previous)

    draft.reasons.append(
        f"generation {draft.number} ({cause}, {len(generation.ranks)} ranks): {reason}"
    )
    attributes = {
        "cause": cause,
        "world_size": str(len(generation.ranks)),
        "reason": reason,
        "joined": _joined(draft, generation),
    }
    draft.records.append(
        Record(kind="generation_formed", generation=draft.number, attributes=attributes)
    )
    draft.effects.append(AnnounceGeneration(generation=generation))
    member_ids = tuple(rank.member_id for rank in generation.ranks)
    draft.effects.append(
        SendMembers(
            generation=draft.number,
            member_ids=member_ids,
            key_digests=draft.key_digests(member_ids),
        )
    )


def named(identity: Identity, rank: int | None) -> str:
    """Returns a human-readable name of a member. `rank`: the member's last rank; None if it had
    none."""
    return (
        f"{'a worker' if rank is None else f'rank {rank}'} (pid {identity.pid} on {identity.host})"
    )


def _joined(draft: Draft, generation: Generation) -> str:
    """Returns a description of the members that are new in a generation; empty if there are none,
    or for the first generation of the run."""
    new = [(number, rank.member_id) for number, rank in enumerate(generation.ranks) if rank.joining]
    if len(new) == len(generation.ranks):
        return ""
    newcomers = [
        named(draft.members[member_id].identity, number) for number, member_id in new[:_MOST_NAMED]
    ]
    return ", ".join(newcomers) + (
        f" and {len(new) - len(newcomers)} more" if len(new) > len(newcomers) else ""
    )


def draining_in_group(draft: Draft) -> list[Member]:
    """Returns the draining members that have not reached their step boundary. Some have a rank in
    the newest generation. The others were excluded by a newer generation, but still work with their
    peers, because none of the peers is known to have adopted it yet."""
    if draft.in_phase(MemberPhase.DRAINING) == 0 or draft.generation is None:
        return []
    furthest = max((draft.works_in(rank.member_id) for rank in draft.generation.ranks), default=0)
    return [
        member
        for member in draft.members.values()
        if member.phase is MemberPhase.DRAINING
        and (has_place(draft, member) or 0 < furthest <= member.works_in)
    ]


def holds_state(draft: Draft, member: Member) -> bool:
    """Returns whether a member is known to have worked in a generation, and therefore holds
    training state."""
    return (
        member.holds_state
        or draft.works_in(member.member_id) > 0
        or _placed_with_state(draft.generation, member.member_id)
    )


def _placed_with_state(generation: Generation | None, member_id: str) -> bool:
    place = None if generation is None else generation.rank_of.get(member_id)
    return place is not None and generation is not None and not generation.ranks[place].joining


def _choose(
    draft: Draft, joiners: int, draining: Mapping[str, Member]
) -> tuple[list[Member], list[Member]]:
    """Returns the members that continue, in rank order, and the new members.

    When a job on hold resumes, all members are READY, including the members of the newest
    generation. These members take precedence over other waiting members and keep their order.
    """
    placed = (
        [draft.members[r.member_id] for r in draft.generation.ranks if r.member_id in draft.members]
        if draft.generation
        else []
    )
    held = [member for member in placed if member.phase is MemberPhase.READY][:joiners]
    going_on = {member.member_id for member in held} | draining.keys()
    survivors = [
        member
        for member in placed
        if member.phase is MemberPhase.RANKED or member.member_id in going_on
    ]
    # A member excluded by a newer generation that no one has adopted yet follows the other members
    # of its host.
    survivors += [member for member in draining.values() if member not in survivors]
    waiting = [
        m
        for m in draft.members.values()
        if m.phase is MemberPhase.READY and m.member_id not in going_on
    ]
    waiting.sort(key=lambda member: member.ready_order)
    return survivors, waiting[: joiners - len(held)]


def _give_ranks(draft: Draft, generation: Generation) -> None:
    """Assigns ranks to the members of a generation. Does not touch the records of members that have
    not changed, so that these need not be written again."""
    at_work = (MemberPhase.RANKED, MemberPhase.DRAINING)
    members, unplaced = draft.members, draft.unplaced
    for rank in generation.ranks:
        member = members[rank.member_id]
        if unplaced:
            unplaced.pop(rank.member_id, None)
        if member.works_in or member.phase not in at_work:
            phase = member.phase if member.phase is MemberPhase.DRAINING else MemberPhase.RANKED
            draft.put_member(replace(member, phase=phase, works_in=0))


def _leave_out_draining(draft: Draft, generation: Generation, previous: Generation | None) -> None:
    """Records, for each draining member that the new generation excludes, the last generation that
    the member was in. If the generation interrupts the other members, the draining member cannot
    reach a step boundary, and is asked to leave now."""
    if draft.in_phase(MemberPhase.DRAINING) == 0 or previous is None:
        return
    for member in list(draft.members.values()):
        if member.phase is not MemberPhase.DRAINING or member.member_id in generation.rank_of:
            continue
        if generation.cause is not Cause.BORDER:
            draft.effects.append(
                SendStop(member_id=member.member_id, reason=member.reason, now=True)
            )
        if member.works_in == 0 and member.member_id in previous.rank_of:
            held = (
                member.holds_state
                or draft.works_in(member.member_id) > 0
                or _placed_with_state(previous, member.member_id)
            )
            draft.put_member(replace(member, works_in=previous.number, holds_state=held))
