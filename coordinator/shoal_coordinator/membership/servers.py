"""Parameter servers: their places, and the layout of a model's tensors over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal_common.errors import LimitError, PreconditionError, UnavailableError

from shoal_coordinator.membership.draft import Draft
from shoal_coordinator.membership.effects import EndServerSession, Record, SendMembers
from shoal_coordinator.membership.events import Ending, ServerLost, ServerRegistered, TensorsDeclared
from shoal_coordinator.membership.reasons import Refusal
from shoal_coordinator.membership.shards import MOST_PIECES, ShardLayout, TensorSpec, count_pieces, lay_out
from shoal_coordinator.membership.state import JobPhase, MemberPhase, Server


@dataclass(frozen=True, kw_only=True)
class Registered:
    """The outcome of ServerRegistered."""

    index: int


def server_registered(draft: Draft, event: ServerRegistered) -> Registered:
    """A parameter server opened a session: a new one takes the lowest free place, one that was there before keeps its own."""
    if draft.spec.parameter_servers == 0:
        raise PreconditionError(
            f"job {draft.spec.job_id} has no parameter servers; create it with parameter_servers >= 1", reason=Refusal.JOB_WITHOUT_SERVERS
        )
    known = draft.servers.get(event.server_id)
    if known is not None and known.alive and (known.host, known.pid) != (event.host, event.pid):
        raise PreconditionError(
            f"server_id {event.server_id} belongs to process {known.pid} on {known.host}, whose lease has not ended; "
            "each server needs an id of its own",
            reason=Refusal.SERVER_CONFLICT,
        )
    index = known.index if known is not None else _free_place(draft, event)
    server = Server(
        server_id=event.server_id,
        index=index,
        address=event.address,
        metrics_address=event.metrics_address,
        host=event.host,
        pid=event.pid,
        alive=True,
    )
    if server != known:
        draft.put_server(server)
        attributes = {"server_id": server.server_id, "server_index": str(index), "address": server.address}
        draft.records.append(Record(kind="server_registered", attributes=attributes))
    draft.effects.append(SendMembers(generation=draft.number, member_ids=_training(draft), server_id=server.server_id))
    return Registered(index=index)


def server_lost(draft: Draft, event: ServerLost) -> None:
    """A parameter server's stream broke or its lease ended. Its place stays its own, unless no tensors lie there yet."""
    server = draft.servers.get(event.server_id)
    if server is None or not server.alive:
        return
    draft.put_server(replace(server, alive=False))
    attributes = {"server_id": server.server_id, "server_index": str(server.index), "ending": event.ending}
    draft.records.append(Record(kind="server_lost", attributes=attributes))
    if event.ending is Ending.LEASE_EXPIRED:
        error = PreconditionError(f"server {server.server_id} sent no heartbeat for {draft.spec.lease_ms} ms", reason=Refusal.LEASE_EXPIRED)
        draft.effects.append(EndServerSession(server_id=server.server_id, error=error))


def tensors_declared(draft: Draft, event: TensorsDeclared) -> ShardLayout:
    """A worker says what its model consists of: the first one fixes the layout, the others get the same."""
    if draft.layout is not None:
        if draft.layout.tensors != event.tensors:
            raise PreconditionError(
                f"job {draft.spec.job_id} has other tensors: {_first_difference(draft.layout, event)}; "
                "all workers must build the same model, with the same parameter groups in the optimizer",
                reason=Refusal.TENSORS_CONFLICT,
            )
        return draft.layout
    wanted = draft.spec.parameter_servers
    if wanted == 0:
        raise PreconditionError(
            f"job {draft.spec.job_id} has no parameter servers; create it with parameter_servers >= 1", reason=Refusal.JOB_WITHOUT_SERVERS
        )
    pieces = count_pieces(event.tensors)
    if pieces > MOST_PIECES:
        raise LimitError(
            f"the tensors make {pieces} pieces of at most 8 MiB; a job holds {MOST_PIECES}: put small tensors together",
            reason=Refusal.TENSORS_LIMIT,
        )
    alive = sum(server.alive for server in draft.servers.values())
    if alive < wanted:
        raise UnavailableError(
            f"job {draft.spec.job_id} waits for its parameter servers: {alive} of {wanted} are registered", reason=Refusal.NO_SERVERS
        )
    draft.layout = lay_out(event.tensors, wanted)
    attributes = {"tensors": str(len(event.tensors)), "partitions": str(len(draft.layout.partitions)), "servers": str(wanted)}
    draft.records.append(Record(kind="tensors_declared", attributes=attributes))
    return draft.layout


def _free_place(draft: Draft, event: ServerRegistered) -> int:
    taken = {server.index: server for server in draft.servers.values()}
    for index in range(draft.spec.parameter_servers):
        holder = taken.get(index)
        if holder is None:
            return index
        if not holder.alive and draft.layout is None:
            # Nothing is stored there yet, so whoever comes may have the place.
            draft.remove_server(holder.server_id)
            return index
    holders = ", ".join(taken[index].server_id for index in sorted(taken)[:8])
    raise PreconditionError(
        f"job {draft.spec.job_id} has its {draft.spec.parameter_servers} parameter servers ({holders}); {event.server_id} is one too many",
        reason=Refusal.SERVERS_COMPLETE,
    )


def _training(draft: Draft) -> tuple[str, ...]:
    """Members that train in the newest generation; none while the job waits."""
    if draft.generation is None or draft.phase is JobPhase.WAITING:
        return ()
    at_work = (MemberPhase.RANKED, MemberPhase.DRAINING)
    live = ((rank.member_id, draft.members.get(rank.member_id)) for rank in draft.generation.ranks)
    return tuple(member_id for member_id, member in live if member is not None and member.phase in at_work)


def _first_difference(layout: ShardLayout, event: TensorsDeclared) -> str:
    if len(layout.tensors) != len(event.tensors):
        return f"{len(layout.tensors)} were declared, not {len(event.tensors)}"
    declared, given = next((a, b) for a, b in zip(layout.tensors, event.tensors, strict=True) if a != b)
    return f"{_shown(declared)} was declared where {_shown(given)} is given"


def _shown(tensor: TensorSpec) -> str:
    return f"{tensor.name!r} {tensor.dtype}{list(tensor.shape)}{', which no optimizer has,' if tensor.frozen else ''}"
