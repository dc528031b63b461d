"""Parameter servers: assigns primaries and backups to places, and assigns a model's tensors to the
places.

A place has an epoch, stored in its primary's record. The epoch increases when the primary changes,
and when a backup arrives, is lost or is dropped. A backup is in sync from the time when its primary
reports this until the backup is lost or the primary reports otherwise. During that time the primary
acknowledges only changes that the backup has too, so that the backup can take over at any moment
(docs/explanation/parameter-servers.md#backups).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal_common.errors import InvalidRequestError, LimitError, PreconditionError, UnavailableError

from shoal_coordinator.membership.model.draft import Draft
from shoal_coordinator.membership.model.effects import (
    EndServerSession,
    Record,
    SendMembers,
    StopServer,
)
from shoal_coordinator.membership.model.events import (
    BackupReported,
    Ending,
    ServerLost,
    ServerRegistered,
    TensorsDeclared,
)
from shoal_coordinator.membership.model.reasons import Refusal
from shoal_coordinator.membership.model.shards import (
    MOST_PIECES,
    ShardLayout,
    TensorSpec,
    count_pieces,
    lay_out,
)
from shoal_coordinator.membership.model.state import JobPhase, Server, ServerRole
from shoal_coordinator.membership.servers.places import (
    holds_something,
    next_epoch,
    of_place,
    primaries,
    send_all_settled,
    send_place,
)


@dataclass(frozen=True, kw_only=True)
class Registered:
    """Outcome of a ServerRegistered event."""

    index: int
    """Place (server_index) of the server. For a drained process, its former place."""


def server_registered(draft: Draft, event: ServerRegistered) -> Registered:
    """Registers a server that has opened a session. A new server gets a place and a role
    (`_newcomer`), and a known server keeps its place. A drained process is instructed to exit."""
    if draft.spec.max_parameter_servers == 0:
        raise PreconditionError(
            f"job {draft.spec.job_id} has no parameter servers; create it with parameter_servers "
            ">= 1",
            reason=Refusal.JOB_WITHOUT_SERVERS,
        )
    if not event.address and not draft.spec.parameter_server_backups:
        raise InvalidRequestError(
            "register.address='': expected host:port with a port of 1 to 65535"
        )
    known = draft.servers.get(event.server_id)
    drained = draft.moves.drained.get(event.server_id)
    if (
        known is None
        and drained is not None
        and event.incarnation
        and drained.incarnation == event.incarnation
    ):
        draft.effects.append(StopServer(server_id=event.server_id, reason=drained.reason))
        return Registered(index=drained.index)
    if (
        draft.phase is JobPhase.FINISHED
        and not draft.members
        and (known is None or known.incarnation != event.incarnation)
    ):
        raise UnavailableError(
            f"run {draft.run} of job {draft.spec.job_id} has ended ({draft.stop_reason}), and the "
            "next one has not begun; this server is waiting for it",
            reason=Refusal.RUN_ENDED,
        )
    if known is not None and known.alive and (known.host, known.pid) != (event.host, event.pid):
        raise PreconditionError(
            f"server_id {event.server_id} belongs to process {known.pid} on {known.host}, whose "
            "lease has not expired; use a separate id for each server",
            reason=Refusal.SERVER_CONFLICT,
        )
    if known is not None and known.alive and known.incarnation != event.incarnation:
        # the server was restarted before its loss was noticed
        server_lost(draft, ServerLost(server_id=known.server_id, ending=Ending.STREAM_BROKEN))
        known = draft.servers.get(event.server_id)
    server = replace(
        known if known is not None else _newcomer(draft, event),
        address=event.address,
        metrics_address=event.metrics_address,
        host=event.host,
        pid=event.pid,
        incarnation=event.incarnation,
        alive=True,
    )
    _raise_number(draft, event)
    if server != known:
        draft.put_server(server)
        attributes = {
            "server_id": server.server_id,
            "server_index": str(server.index),
            "address": server.address,
            "role": server.role,
        }
        draft.records.append(Record(kind="server_registered", attributes=attributes))
        if server.role is ServerRole.BACKUP and (known is None or not known.alive):
            next_epoch(draft, server.index)
    primary = of_place(draft, server.index, ServerRole.PRIMARY)
    if primary is not None and not primary.alive:
        _promote(draft, primary)  # possible before there is a shard map
    draft.look_at_moves_ms = draft.now.ms
    training = draft.training()
    draft.effects.append(
        SendMembers(
            generation=draft.number,
            member_ids=training,
            key_digests=draft.key_digests(training),
            server_id=server.server_id,
        )
    )
    send_place(draft, server.index)
    return Registered(index=server.index)


def _raise_number(draft: Draft, event: ServerRegistered) -> None:
    """Makes sure that the next generation gets a number above the generation that a server reports,
    in case Redis has lost that generation. The server would otherwise mistake members of a new
    generation for members of an old one. Servers of a different run do not report such
    generations."""
    lost = event.generation - draft.number
    if not 0 < lost <= draft.policy.most_lost_generations:
        return
    reason = (
        f"Redis lost generations {draft.number + 1} to {event.generation}, which server "
        f"{event.server_id} reported"
    )
    draft.number = event.generation
    draft.reasons.append(reason)
    draft.records.append(
        Record(kind="generations_lost", generation=draft.number, attributes={"reason": reason})
    )


def server_lost(draft: Draft, event: ServerLost) -> None:
    """Records that a server's stream has broken or its lease has expired. If the server is a
    primary, its backup takes over, provided that the backup has all acknowledged changes. Otherwise
    the place stays reserved for the lost server, unless no tensors have been assigned to it yet."""
    server = draft.servers.get(event.server_id)
    if server is None or not server.alive:
        return
    draft.put_server(replace(server, alive=False, in_sync=False))
    draft.look_at_moves_ms = draft.now.ms
    attributes = {
        "server_id": server.server_id,
        "server_index": str(server.index),
        "ending": event.ending,
    }
    draft.records.append(Record(kind="server_lost", attributes=attributes))
    if event.ending is Ending.LEASE_EXPIRED:
        error = PreconditionError(
            f"server {server.server_id} sent no heartbeat for {draft.spec.lease_ms} ms",
            reason=Refusal.LEASE_EXPIRED,
        )
        draft.effects.append(EndServerSession(server_id=server.server_id, error=error))
    if server.role is ServerRole.BACKUP:
        next_epoch(draft, server.index)
    else:
        _promote(draft, server)
    send_place(draft, server.index)


def backup_reported(draft: Draft, event: BackupReported) -> None:
    """Records a primary's report about its backup. Ignores reports about an older epoch, and
    reports from a former primary."""
    primary = draft.servers.get(event.server_id)
    if (
        primary is None
        or not primary.alive
        or primary.role is not ServerRole.PRIMARY
        or primary.epoch != event.epoch
    ):
        return
    backup = of_place(draft, primary.index, ServerRole.BACKUP)
    if backup is None or not backup.alive or (backup.in_sync and event.in_sync):
        return
    draft.put_server(replace(backup, in_sync=event.in_sync))
    draft.look_at_moves_ms = draft.now.ms
    attributes = {
        "server_id": backup.server_id,
        "server_index": str(backup.index),
        "primary": primary.server_id,
        "reason": event.reason,
    }
    draft.records.append(
        Record(kind="backup_in_sync" if event.in_sync else "backup_dropped", attributes=attributes)
    )
    if not event.in_sync:
        next_epoch(draft, primary.index)
    send_place(draft, primary.index)


def _promote(draft: Draft, lost: Server) -> None:
    """Makes the backup of a lost primary the new primary, if possible. The lost server becomes the
    backup of the new primary."""
    backup = of_place(draft, lost.index, ServerRole.BACKUP)
    if backup is None or not backup.alive or not (backup.in_sync or draft.layout is None):
        return
    draft.put_server(replace(lost, role=ServerRole.BACKUP, alive=False, in_sync=False))
    draft.put_server(replace(backup, role=ServerRole.PRIMARY, epoch=lost.epoch + 1, in_sync=False))
    attributes = {
        "server_id": backup.server_id,
        "server_index": str(backup.index),
        "before": lost.server_id,
    }
    draft.records.append(Record(kind="server_promoted", attributes=attributes))


@dataclass(frozen=True, kw_only=True)
class ServersAwaited:
    """Outcome of a TensorsDeclared event while servers are missing. The worker should retry."""

    registered: int
    wanted: int


def tensors_declared(draft: Draft, event: TensorsDeclared) -> ShardLayout | ServersAwaited:
    """Records a worker's declaration of its tensors. The first declaration determines the layout;
    later declarations get the same layout."""
    if draft.layout is not None:
        if draft.layout.tensors != event.tensors:
            raise PreconditionError(
                f"job {draft.spec.job_id} has different tensors: "
                f"{_first_difference(draft.layout, event)}; all workers must build the same "
                "model, with the same parameter groups in the optimizer",
                reason=Refusal.TENSORS_CONFLICT,
            )
        _check_all_have_addresses(draft, draft.layout)
        return draft.layout
    wanted = draft.spec.servers_to_lay_out
    if wanted == 0:
        raise PreconditionError(
            f"job {draft.spec.job_id} has no parameter servers; create it with parameter_servers "
            ">= 1",
            reason=Refusal.JOB_WITHOUT_SERVERS,
        )
    pieces = count_pieces(event.tensors)
    if pieces > MOST_PIECES:
        raise LimitError(
            f"the tensors form {pieces} pieces of at most 8 MiB, but a job may have at most "
            f"{MOST_PIECES}; merge small tensors",
            reason=Refusal.TENSORS_LIMIT,
        )
    there = [index for index, primary in primaries(draft).items() if primary.serves]
    draft.servers_awaited = max(0, wanted - len(there))
    if draft.servers_awaited:
        return ServersAwaited(registered=len(there), wanted=wanted)
    draft.layout = lay_out(event.tensors, there)
    attributes = {
        "tensors": str(len(event.tensors)),
        "partitions": str(len(draft.layout.partitions)),
        "servers": str(len(there)),
    }
    draft.records.append(Record(kind="tensors_declared", attributes=attributes))
    draft.look_at_moves_ms = draft.now.ms
    send_all_settled(draft)
    return draft.layout


def _check_all_have_addresses(draft: Draft, layout: ShardLayout) -> None:
    """Raises UnavailableError unless every place has a primary with an address. A backup that has
    only just been promoted may not have reported its address yet."""
    for index in layout.shares:
        primary = of_place(draft, index, ServerRole.PRIMARY)
        if primary is None or not primary.address:
            raise UnavailableError(
                f"job {draft.spec.job_id} is waiting for the primary of its parameter server "
                f"{index} to report its address",
                reason=Refusal.NO_SERVERS,
            )


def _newcomer(draft: Draft, event: ServerRegistered) -> Server:
    """Returns the record of a new server. It gets the first place without a primary; otherwise, in
    a job with backups, the first place without a backup; otherwise a new place, if the job may have
    more.

    An absent primary without partitions, and an absent backup, count as missing. If Redis has lost
    the job, a server that still has the partitions of a place gets this place."""
    places = primaries(draft)
    if draft.layout is None and event.held_index is not None and event.held_index not in places:
        return _placed(
            event, event.held_index
        )  # Redis has lost the job, but the server still has its partitions
    staying = [index for index in places if index not in draft.moves.draining]
    for index in sorted(
        {*staying, *(range(draft.spec.servers_to_lay_out) if draft.layout is None else ())}
    ):
        primary = places.get(index)
        if primary is None:
            return _placed(event, index)
        if not primary.alive and not holds_something(draft, index):
            draft.remove_server(primary.server_id)  # the place's last server had no partitions
            return replace(_placed(event, index), epoch=primary.epoch + 1)
    for index in staying if draft.spec.parameter_server_backups else ():
        backup = of_place(draft, index, ServerRole.BACKUP)
        if backup is None or not backup.alive:
            if backup is not None:
                # the new backup gets everything from the primary
                draft.remove_server(backup.server_id)
            return _placed(event, index, ServerRole.BACKUP)
    if len(staying) < draft.spec.max_parameter_servers:
        return _placed(
            event, next(index for index in range(len(places) + 1) if index not in places)
        )
    holders = ", ".join(
        server.server_id for server in sorted(draft.servers.values(), key=lambda s: s.index)[:8]
    )
    beside = f" and {len(staying)} backups" if draft.spec.parameter_server_backups else ""
    raise PreconditionError(
        f"job {draft.spec.job_id} already has its {len(staying)} parameter servers{beside} "
        f"({holders}), so {event.server_id} is one too many; create the job with more servers, or "
        "with a larger max_parameter_servers (--max-servers)",
        reason=Refusal.SERVERS_COMPLETE,
    )


def _placed(event: ServerRegistered, index: int, role: ServerRole = ServerRole.PRIMARY) -> Server:
    return Server(
        server_id=event.server_id,
        index=index,
        address="",
        metrics_address="",
        host="",
        pid=0,
        alive=False,
        role=role,
    )


def _first_difference(layout: ShardLayout, event: TensorsDeclared) -> str:
    if len(layout.tensors) != len(event.tensors):
        return f"{len(layout.tensors)} were declared before, not {len(event.tensors)}"
    declared, given = next(
        (a, b) for a, b in zip(layout.tensors, event.tensors, strict=True) if a != b
    )
    return f"{_shown(declared)} was declared before, not {_shown(given)}"


def _shown(tensor: TensorSpec) -> str:
    if tensor.table is not None:
        return f"table {tensor.name!r} {list(tensor.shape)} ({tensor.table})"
    return (
        f"{tensor.name!r} "
        f"{tensor.dtype}{list(tensor.shape)}{' (in no optimizer)' if tensor.frozen else ''}"
    )
