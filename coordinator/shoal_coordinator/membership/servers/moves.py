"""Moves partitions between servers, one move at a time. The state written here determines who owns
each partition (docs/explanation/parameter-servers.md#moving-partitions).

A move is first written to Redis and then sent to its giver, the server that hands the partitions
over. Only the giver's report ends the move. If the giver is lost, the coordinator waits for it or
its backup to return, because the giver's journal may record that the partitions have left. If it
does not, the returning process reports that the move has failed. The new owner is written together
with the end of the move, and only if the process that received the partitions is still alive. All
primaries are notified when a move has ended, and again when they reconnect; a giver that reconnects
receives the current move.

A receiver with a full disk would remain the emptiest server, and a giver with a failing disk the
fullest, so the same move would be chosen again. After a failed move, the server that the giver
blames is therefore excluded for a while, and other servers take its role.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from shoal_common.errors import PreconditionError, UnknownResourceError

from shoal_coordinator.membership.model.draft import Draft
from shoal_coordinator.membership.model.effects import Record, StopServer
from shoal_coordinator.membership.model.events import MoveReported, ServerDrainRequested
from shoal_coordinator.membership.model.reasons import Refusal
from shoal_coordinator.membership.model.state import (
    Drained,
    FailedServer,
    JobPhase,
    Move,
    Server,
    ServerRole,
)
from shoal_coordinator.membership.servers.places import (
    holds_something,
    of_place,
    primaries,
    send_all_settled,
    send_move,
    send_settled,
)
from shoal_coordinator.membership.servers.rebalancing import next_move


def server_drain_requested(draft: Draft, event: ServerDrainRequested) -> None:
    """Starts draining a server: its partitions move to the other servers, and then the servers of
    its place exit. A repeated request has no effect."""
    server = draft.servers.get(event.server_id)
    if server is None:
        there = ", ".join(sorted(draft.servers)[:8]) or "none"
        raise UnknownResourceError(
            f"job {draft.spec.job_id} has no parameter server {event.server_id!r}; registered "
            f"servers: {there}",
            reason=Refusal.SERVER_UNKNOWN,
        )
    if draft.layout is None:
        raise PreconditionError(
            f"no member of job {draft.spec.job_id} has declared its tensors, so server "
            f"{event.server_id} has no partitions to move yet; stop the server's process instead "
            "of draining it",
            reason=Refusal.PLACE_WITHOUT_TENSORS,
        )
    if server.index in draft.moves.draining:
        return
    others = [
        index
        for index in primaries(draft).keys() - draft.moves.draining.keys() - {server.index}
        if _counts(draft, index)
    ]
    if not others:
        raise PreconditionError(
            f"server {event.server_id} is the last one of job {draft.spec.job_id} that is not "
            "draining, so no other could take over its partitions; start another server first (if "
            "max_parameter_servers allows), or stop the job",
            reason=Refusal.LAST_SERVER,
        )
    draft.moves = replace(
        draft.moves, draining={**draft.moves.draining, server.index: event.reason}
    )
    draft.records.append(
        Record(kind="server_draining", attributes={**_named(server), "reason": event.reason})
    )
    draft.look_at_moves_ms = draft.now.ms


def _counts(draft: Draft, index: int) -> bool:
    """Returns whether a place can receive partitions, either now or once its server has returned.
    This excludes a place whose server is absent and that has no partitions, because the next new
    server gets this place."""
    primary = of_place(draft, index, ServerRole.PRIMARY)
    return (primary is not None and primary.alive) or holds_something(draft, index)


def move_reported(draft: Draft, event: MoveReported) -> None:
    """Ends the current move with the outcome that the giver reports. If that move has already
    ended, notifies the giver again, because it has missed the first notification."""
    giver = draft.servers.get(event.server_id)
    if giver is None or not giver.alive or giver.role is not ServerRole.PRIMARY:
        return
    move = draft.moves.under_way
    if event.move <= draft.moves.settled:
        send_settled(draft, giver)
    elif move is not None and event.move == move.number and giver.index == move.giver:
        _settle(draft, move, event)


def _settle(draft: Draft, move: Move, event: MoveReported) -> None:
    assert draft.layout is not None, "partitions that move are those of a layout"
    attributes = {
        "move": str(move.number),
        "partitions": str(len(move.partitions)),
        "from": str(move.giver),
        "to": str(move.receiver),
    }
    failure = _failure(draft, move, event)
    if failure:
        _leave_out(draft, move, event)
        draft.records.append(
            Record(kind="move_failed", attributes={**attributes, "reason": failure})
        )
    else:
        nbytes = sum(draft.layout.sizes[partition] for partition in move.partitions)
        draft.layout = draft.layout.moved(move.partitions, move.receiver)
        draft.failed_receivers = {
            index: failed
            for index, failed in draft.failed_receivers.items()
            if index != move.receiver
        }
        draft.failed_givers = {
            index: failed for index, failed in draft.failed_givers.items() if index != move.giver
        }
        attributes |= {"bytes": str(nbytes), "epoch": str(draft.layout.epoch)}
        draft.records.append(Record(kind="partitions_moved", attributes=attributes))
    draft.moves = replace(draft.moves, settled=move.number, under_way=None)
    draft.look_at_moves_ms = draft.now.ms
    send_all_settled(draft)


def _leave_out(draft: Draft, move: Move, event: MoveReported) -> None:
    """Temporarily excludes the server to blame for a failed move. If the giver blames itself, this
    is the giver; otherwise it is the process that had received the partitions or, if that is
    unknown, the current process in the receiving place."""
    if event.giver_failed:
        giver = of_place(draft, move.giver, ServerRole.PRIMARY)
        assert giver is not None, "it has reported"
        draft.failed_givers = _with_failure(
            draft, draft.failed_givers, giver.index, giver.incarnation
        )
        return
    receiver = of_place(draft, move.receiver, ServerRole.PRIMARY)
    incarnation = event.receiver_incarnation or ("" if receiver is None else receiver.incarnation)
    draft.failed_receivers = _with_failure(
        draft, draft.failed_receivers, move.receiver, incarnation
    )


def _with_failure(
    draft: Draft, failed: Mapping[int, FailedServer], index: int, incarnation: str
) -> Mapping[int, FailedServer]:
    """Returns a copy of `failed` that records one more failed move for the process `incarnation`,
    which has the place with this index."""
    before = failed.get(index)
    failures = before.failures if before is not None and before.incarnation == incarnation else 0
    wait_ms = min(
        draft.policy.move_retry_ms << min(failures, 16), draft.policy.longest_move_retry_ms
    )
    return {
        **failed,
        index: FailedServer(
            incarnation=incarnation, failures=failures + 1, until_ms=draft.now.ms + wait_ms
        ),
    }


def _failure(draft: Draft, move: Move, event: MoveReported) -> str:
    """Returns the reason why a move failed; empty if the move succeeded."""
    if not event.taken:
        return event.reason or "the giver gave no reason"
    receiver = of_place(draft, move.receiver, ServerRole.PRIMARY)
    if receiver is None or not receiver.alive:
        return "the receiver was lost after it had received them"
    if receiver.incarnation != event.receiver_incarnation:
        return "the receiver's place was taken by a process other than the one that received them"
    return ""


def moves_due(draft: Draft) -> None:
    """Removes places that are drained, and starts the next move if one is due. Runs at the end of
    each transition.

    Because it iterates over all partitions, it returns immediately unless something relevant has
    changed or the exclusion of a server has ended.
    """
    if (
        draft.look_at_moves_ms is None
        or draft.layout is None
        or draft.now.ms < draft.look_at_moves_ms
    ):
        return
    draft.look_at_moves_ms = None
    for index in draft.moves.draining:
        if not holds_something(draft, index):
            _end_place(draft, index)
    if draft.moves.under_way is None and draft.phase in (JobPhase.WAITING, JobPhase.RUNNING):
        _begin_next(draft)


def _begin_next(draft: Draft) -> None:
    assert draft.layout is not None, "the caller checks that there is a layout"
    there = primaries(draft)
    serving = [index for index, primary in there.items() if primary.serves]
    not_giving = _left_out(draft, draft.failed_givers, [there[index] for index in serving])
    not_taking = _left_out(draft, draft.failed_receivers, [there[index] for index in serving])
    plan = next_move(
        draft.layout,
        givers=[index for index in serving if index not in not_giving],
        receivers=[
            index for index in serving if index not in not_taking and _is_safe(draft, index)
        ],
        draining=draft.moves.draining.keys(),
    )
    if plan is not None:
        giver = there[plan.giver]
        move = Move(
            number=draft.moves.settled + 1,
            partitions=plan.partitions,
            giver=plan.giver,
            giver_incarnation=giver.incarnation,
            receiver=plan.receiver,
        )
        draft.moves = replace(draft.moves, under_way=move)
        draft.reasons.append(
            f"move {move.number}: {len(move.partitions)} partitions from server {move.giver} to "
            f"server {move.receiver}"
        )
        send_move(draft, giver)
    else:
        draft.look_at_moves_ms = min([*not_giving.values(), *not_taking.values()], default=None)


def _left_out(
    draft: Draft, failed: Mapping[int, FailedServer], servers: Iterable[Server]
) -> dict[int, int]:
    """Returns the places whose current process is excluded because it is to blame for a failed
    move: index -> time at which the exclusion ends."""
    found: dict[int, int] = {}
    for server in servers:
        failure = failed.get(server.index)
        if (
            failure is not None
            and failure.incarnation == server.incarnation
            and failure.until_ms > draft.now.ms
        ):
            found[server.index] = failure.until_ms
    return found


def _is_safe(draft: Draft, index: int) -> bool:
    """Returns whether the backup of a place also stores the partitions that the place receives.
    Always True in a job without backups."""
    backup = of_place(draft, index, ServerRole.BACKUP)
    return not draft.spec.parameter_server_backups or (backup is not None and backup.in_sync)


def _end_place(draft: Draft, index: int) -> None:
    """Asks the connected servers of a drained place to exit. Once none is alive, removes the
    place; a server that reconnects later is asked to exit then."""
    servers = [server for server in draft.servers.values() if server.index == index]
    reason = f"drained: {draft.moves.draining[index]}"
    for server in servers:
        if server.alive:
            draft.effects.append(StopServer(server_id=server.server_id, reason=reason))
    if any(server.alive for server in servers):
        return
    for server in servers:
        draft.remove_server(server.server_id)
        draft.records.append(Record(kind="server_drained", attributes=_named(server)))
    ended = {
        s.server_id: Drained(incarnation=s.incarnation, index=index, reason=reason) for s in servers
    }
    before = {
        server_id: drained
        for server_id, drained in draft.moves.drained.items()
        if server_id not in ended
    }
    draft.moves = replace(
        draft.moves,
        draining={other: why for other, why in draft.moves.draining.items() if other != index},
        drained=dict([*before.items(), *ended.items()][-draft.policy.most_drained :]),
    )


def _named(server: Server) -> dict[str, str]:
    return {"server_id": server.server_id, "server_index": str(server.index), "role": server.role}
