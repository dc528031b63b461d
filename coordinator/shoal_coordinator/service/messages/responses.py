"""Converts values of the core to protobuf messages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Final

from shoal_common.formats.rank_table import MOST_SENT_WHOLE, runs
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_coordinator.membership.model.effects import SendMove, SendNotice, SendPlace
from shoal_coordinator.membership.model.events import Ending
from shoal_coordinator.membership.model.observation import ObservedJob
from shoal_coordinator.membership.model.pulse import Progress, Pulse, Pulses
from shoal_coordinator.membership.model.shards import Bucket, ShardLayout, Share, TensorSpec
from shoal_coordinator.membership.model.spec import JobSpec
from shoal_coordinator.membership.model.state import (
    Cause,
    Generation,
    JobEnding,
    JobPhase,
    JobState,
    MachineCondition,
    Member,
    MemberPhase,
    Now,
    PastRun,
    RunId,
    Server,
    ServerRole,
)
from shoal_coordinator.state.store import StoredEvent

_SILENT_MS: Final = 5_000
MOST_BEHIND: Final = 64
JOB_PHASES: Final = {
    JobPhase.WAITING: pb.JOB_PHASE_WAITING,
    JobPhase.RUNNING: pb.JOB_PHASE_RUNNING,
    JobPhase.STOPPING: pb.JOB_PHASE_STOPPING,
    JobPhase.FINISHED: pb.JOB_PHASE_FINISHED,
}
JOB_ENDINGS: Final = {
    JobEnding.NONE: pb.JOB_ENDING_UNSPECIFIED,
    JobEnding.COMPLETED: pb.JOB_ENDING_COMPLETED,
    JobEnding.STOPPED: pb.JOB_ENDING_STOPPED,
    JobEnding.FAILED: pb.JOB_ENDING_FAILED,
}
MEMBER_PHASES: Final = {
    MemberPhase.JOINED: pb.MEMBER_PHASE_JOINED,
    MemberPhase.READY: pb.MEMBER_PHASE_READY,
    MemberPhase.RANKED: pb.MEMBER_PHASE_RANKED,
    MemberPhase.DRAINING: pb.MEMBER_PHASE_DRAINING,
    MemberPhase.QUARANTINED: pb.MEMBER_PHASE_QUARANTINED,
}
MACHINE_CONDITIONS: Final = {
    MachineCondition.HEALTHY: pb.MACHINE_CONDITION_HEALTHY,
    MachineCondition.LEAVING: pb.MACHINE_CONDITION_LEAVING,
    MachineCondition.UNHEALTHY: pb.MACHINE_CONDITION_UNHEALTHY,
    MachineCondition.EXCLUDED: pb.MACHINE_CONDITION_EXCLUDED,
}
_ROLES: Final = {
    ServerRole.PRIMARY: pb.SERVER_ROLE_PRIMARY,
    ServerRole.BACKUP: pb.SERVER_ROLE_BACKUP,
}
CAUSES: Final = {
    Cause.START: pb.Generation.CAUSE_START,
    Cause.FAILURE: pb.Generation.CAUSE_FAILURE,
    Cause.BORDER: pb.Generation.CAUSE_BORDER,
}


def run_message(run: RunId) -> pb.RunId:
    """Converts a run's id to a message."""
    return pb.RunId(number=run.number, began_unix_ms=run.began_unix_ms)


def notice_message(effect: SendNotice) -> pb.Notice:
    """Returns the message that informs members what training is waiting for."""
    return pb.Notice(
        text=effect.text,
        silent=[
            pb.SilentMember(
                member_id=each.member_id, pid=each.pid, read_by=each.read_by, logs=each.logs
            )
            for each in effect.silent
        ],
    )


def past_run_message(past: PastRun) -> pb.RunStatus:
    """Converts a past run and its outcome to a message."""
    return pb.RunStatus(
        run=run_message(past.run),
        ended_unix_ms=past.ended_unix_ms,
        ending=JOB_ENDINGS[past.ending],
        ending_reason=past.reason,
    )


def ended_run_message(past: PastRun, state: JobState, now_unix_ms: int) -> pb.GetJobResponse:
    """Returns the GetJob response about a past run: everything that is recorded about this run."""
    return pb.GetJobResponse(
        spec=spec_message(state.spec),
        phase=pb.JOB_PHASE_FINISHED,
        now_unix_ms=now_unix_ms,
        ending=JOB_ENDINGS[past.ending],
        ending_reason=past.reason,
        run=run_message(past.run),
        past_runs=[past_run_message(each) for each in state.past_runs],
    )


def spec_message(spec: JobSpec) -> pb.JobSpec:
    """Converts a job's specification to a message."""
    return pb.JobSpec(
        job_id=spec.job_id,
        min_workers=spec.min_workers,
        min_survivors=spec.min_survivors,
        max_workers=spec.max_workers,
        parameter_servers=spec.parameter_servers,
        parameter_server_backups=spec.parameter_server_backups,
        max_parameter_servers=spec.max_parameter_servers,
        join_grace_ms=spec.join_grace_ms,
        lease_ms=spec.lease_ms,
        stall_timeout_ms=spec.stall_timeout_ms,
    )


def generation_message(generation: Generation) -> pb.Generation:
    """Converts a generation to a message with its full rank table (about 100 bytes per rank)."""
    message = _generation_head(generation)
    message.ranks.extend(
        rank_message(generation, position) for position in range(len(generation.ranks))
    )
    return message


_EVICTED: Final = (Ending.STREAM_BROKEN, Ending.LEASE_EXPIRED, Ending.STALLED)


def announcement(
    generation: Generation, *, most_whole: int = MOST_SENT_WHOLE
) -> Callable[[int], bytes]:
    """Returns a function that maps a rank to the serialized message that announces the generation
    to this rank. The part common to all ranks is serialized only once.

    Up to `most_whole` ranks, the message contains the full rank table; with more, only the changes.
    Members that need the table call GetRanks.
    """
    head = _generation_head(generation)
    if len(generation.ranks) <= most_whole:
        head.ranks.extend(
            rank_message(generation, position) for position in range(len(generation.ranks))
        )
    elif (change := generation.change) is not None:
        added = [rank_message(generation, position) for position in change.added]
        head.change.CopyFrom(pb.RankChange(since=change.since, removed=change.removed, added=added))
    for_all = pb.MemberDirective(generation=head).SerializeToString()
    # protobuf parses concatenated serialized messages as one merged message.
    return lambda rank: for_all + _rank_alone(rank)


@functools.cache
def _rank_alone(rank: int) -> bytes:
    message: bytes = pb.MemberDirective(rank=rank).SerializeToString()
    return message


def ranks_message(generation: Generation, positions: Iterable[int]) -> pb.GetRanksResponse:
    """Converts the ranks at `positions` of a generation to a response."""
    return pb.GetRanksResponse(ranks=[rank_message(generation, position) for position in positions])


def rank_message(generation: Generation, position: int) -> pb.Rank:
    """Converts the rank at `position` of a generation to a message."""
    rank = generation.ranks[position]
    return pb.Rank(
        rank=position,
        member_id=rank.member_id,
        host=rank.host,
        local_rank=rank.local_rank,
        local_world_size=rank.local_world_size,
        donor_address=rank.donor_address,
        donor_key=rank.donor_key,
        joining=rank.joining,
    )


def _generation_head(generation: Generation) -> pb.Generation:
    """Converts a generation to a message without the rank table."""
    return pb.Generation(
        number=generation.number,
        nonce=generation.nonce,
        cause=CAUSES[generation.cause],
        interrupts_below=generation.interrupts_below,
        created_unix_ms=generation.created_unix_ms,
        world_size=len(generation.ranks),
        table_digest=generation.table_digest,
        joining=runs(position for position, rank in enumerate(generation.ranks) if rank.joining),
        most_local_ranks=max(rank.local_world_size for rank in generation.ranks),
    )


def job_message(
    state: JobState,
    pulses: Pulses,
    now_unix_ms: int,
    *,
    now_ms: int = 0,
    member_id: str = "",
    below_step: int = 0,
) -> pb.GetJobResponse:
    """Returns the parts of a job's state that callers may see. Members with a rank come first.

    Omits the generation's nonce and the members' donor keys, which give access to a member's state
    and are sent only in the members' own sessions.

    Args:
        state: state of the job.
        pulses: heartbeat states.
        now_unix_ms: current time by Redis's clock.
        now_ms: current time (Now.ms), used to determine silent members.
        member_id, below_step: filters on the members, as in shoal.v1.GetJobRequest.
    """
    places = (
        {}
        if state.generation is None or state.phase is JobPhase.WAITING
        else state.generation.rank_of
    )
    last = len(places)
    if member_id:
        members = [state.members[member_id]] if member_id in state.members else []
    elif below_step:
        members = _behind(state, pulses, below_step)
    else:
        members = sorted(
            state.members.values(),
            key=lambda m: (places.get(m.member_id, last), m.joined_unix_ms, m.member_id),
        )
    make = _generation_head if member_id or below_step else generation_message
    generation = None if state.generation is None else make(state.generation)
    if generation is not None:
        generation.ClearField("nonce")
        for rank in generation.ranks:
            rank.ClearField("donor_key")
    seen = None
    if not (
        member_id or below_step
    ):  # omitted from the response to members' requests, which are frequent
        seen = ObservedJob(state=state, pulses=pulses, now=Now(ms=now_ms, unix_ms=now_unix_ms))
    return pb.GetJobResponse(
        spec=spec_message(state.spec),
        phase=JOB_PHASES[state.phase],
        generation=generation,
        members=[
            _member_message(
                m,
                places.get(m.member_id, -1),
                state,
                pulses,
                now_ms,
                explained=seen is not None and m.member_id in seen.explained,
            )
            for m in members
        ],
        servers=server_messages(state),
        now_unix_ms=now_unix_ms,
        ending=JOB_ENDINGS[state.ending],
        ending_reason=state.stop_reason,
        waits_for=state.waits_for,
        run=run_message(state.run),
        past_runs=[past_run_message(past) for past in state.past_runs],
        servers_awaited=state.servers_awaited,
        member_put_out=(gone := state.departed.get(member_id)) is not None
        and gone.ending in _EVICTED,
        newest_step=0 if seen is None else seen.newest_step,
        steps_in_all=0 if seen is None else seen.steps_in_all,
        machines=[] if seen is None else _machine_messages(state),
    )


def _machine_messages(state: JobState) -> list[pb.MachineStatus]:
    return [
        pb.MachineStatus(
            host=host,
            condition=MACHINE_CONDITIONS[machine.condition],
            reason=machine.reason,
            since_unix_ms=machine.since_unix_ms,
        )
        for host, machine in sorted(state.machines.items())
    ]


def _behind(state: JobState, pulses: Pulses, step: int) -> list[Member]:
    """Returns up to MOST_BEHIND members that have committed fewer than `step` steps. Considers the
    members of the newest generation, even if the job is on hold, and members that are draining."""
    ranked = {} if state.generation is None else state.generation.rank_of
    found = (
        member
        for member_id, member in state.members.items()
        if (member_id in ranked or member.phase is MemberPhase.DRAINING)
        and ((pulse := pulses.members.get(member_id)) is None or pulse.progress.step < step)
    )
    return list(itertools.islice(found, MOST_BEHIND))


def summary_message(state: JobState) -> pb.JobSummary:
    """Converts a job to its entry in the list of jobs."""
    return pb.JobSummary(
        job_id=state.spec.job_id,
        phase=JOB_PHASES[state.phase],
        generation=state.number,
        world_size=0 if state.generation is None else len(state.generation.ranks),
        run=run_message(state.run),
    )


def server_messages(state: JobState) -> list[pb.ServerStatus]:
    """Returns the statuses of a job's parameter servers by place. The primary of a place precedes
    its backup."""
    servers = sorted(state.servers.values(), key=lambda server: (server.index, _ROLES[server.role]))
    return [_server_message(server, state) for server in servers]


def place_message(effect: SendPlace) -> pb.ServerDirective:
    """Returns the message that informs a parameter server of its place (shoal.v1.ServerPlace)."""
    return pb.ServerDirective(
        place=pb.ServerPlace(
            epoch=effect.epoch,
            role=_ROLES[effect.role],
            primary_address=effect.primary_address,
            backup_id=effect.backup_id,
            in_sync=effect.in_sync,
        )
    )


def move_message(effect: SendMove) -> pb.ServerDirective:
    """Returns the message that tells a server which partitions to hand over, and to which
    server."""
    move = effect.move
    return pb.ServerDirective(
        move=pb.MovePartitions(
            move=move.number,
            partition_ids=move.partitions,
            receiver_index=move.receiver,
            receiver_address=effect.receiver_address,
            giver_incarnation=move.giver_incarnation,
        )
    )


def shard_map_message(layout: ShardLayout, state: JobState) -> pb.ShardMap:
    """Returns the shard map: which place owns each partition, and the addresses of the
    primaries."""
    return pb.ShardMap(
        epoch=layout.epoch,
        tensors=[_tensor_message(tensor) for tensor in layout.tensors],
        partitions=[
            pb.Partition(
                partition_id=number,
                pieces=[
                    pb.Piece(
                        tensor_index=piece.tensor_index, offset=piece.offset, length=piece.length
                    )
                    for piece in partition.pieces
                ],
                primary=partition.primary,
                bucket=_bucket_message(partition.bucket),
            )
            for number, partition in enumerate(layout.partitions)
        ],
        servers=[
            message for message in server_messages(state) if message.role == pb.SERVER_ROLE_PRIMARY
        ],
    )


def _tensor_message(tensor: TensorSpec) -> pb.TensorSpec:
    table = None if tensor.table is None else tensor.table.message()
    return pb.TensorSpec(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        frozen=tensor.frozen,
        apart=tensor.apart,
        table=table,
    )


def _bucket_message(bucket: Bucket | None) -> pb.Bucket | None:
    return (
        None
        if bucket is None
        else pb.Bucket(tensor_index=bucket.tensor_index, number=bucket.number)
    )


def event_message(event: StoredEvent) -> pb.Event:
    """Converts an entry of the event log to a message."""
    record = event.record
    return pb.Event(
        event_id=event.event_id,
        unix_ms=event.unix_ms,
        kind=record.kind,
        generation=record.generation,
        member_id=record.member_id,
        attributes=record.attributes,
        run=record.run,
    )


def note_of(state: JobState, member: Member, pulse: Pulse | None, now_ms: int) -> str:
    """Returns a note about a member that is silent or slows the others down; empty for other
    members."""
    if pulse is not None and pulse.silent_ms(now_ms) > max(state.spec.unheard_ms, _SILENT_MS):
        return f"no heartbeat for {pulse.silent_ms(now_ms) // 1000} s"
    straggler = state.stragglers.get(member.member_id)
    return straggler.text if straggler is not None and straggler.is_named else ""


def _member_message(
    member: Member, rank: int, state: JobState, pulses: Pulses, now_ms: int, *, explained: bool
) -> pb.MemberStatus:
    identity, pulse = member.identity, pulses.members.get(member.member_id)
    progress = Progress() if pulse is None else pulse.progress
    return pb.MemberStatus(
        member_id=identity.member_id,
        phase=MEMBER_PHASES[member.phase],
        rank=rank,
        host=identity.host,
        pid=identity.pid,
        metrics_address=identity.metrics_address,
        progress=_progress_message(progress, stacks=progress.stacks if explained else ""),
        joined_unix_ms=member.joined_unix_ms,
        launcher_id=identity.launcher_id,
        note=note_of(state, member, pulse, now_ms),
    )


def _progress_message(progress: Progress, *, stacks: str) -> pb.Progress:
    return pb.Progress(
        step=progress.step,
        steps_in_all=progress.steps_in_all,
        epoch=progress.epoch,
        sequence=progress.sequence,
        samples_per_s=progress.samples_per_s,
        loss=progress.loss,
        step_time_s=progress.step_time_s,
        samples=progress.samples,
        staleness=progress.staleness,
        waiting_s=progress.waiting_s,
        waiting_in=progress.waiting_in,
        busy_time_s=progress.busy_time_s,
        cpu_s=progress.cpu_s,
        server_wait_s=progress.server_wait_s,
        awaited_server=progress.awaited_server,
        script_line=progress.script_line,
        share=progress.share,
        upload_backlog_bytes=progress.upload_backlog_bytes,
        last_wait=progress.last_wait,
        stacks=stacks,
        metrics=progress.metrics,
        busy_link=None
        if progress.busy_link is None
        else pb.BusyLink(rank=progress.busy_link[0], bytes_per_s=progress.busy_link[1]),
    )


def _server_message(server: Server, state: JobState) -> pb.ServerStatus:
    share = None if state.layout is None else state.layout.shares.get(server.index)
    share = share or Share(partitions=0, nbytes=0)
    return pb.ServerStatus(
        server_id=server.server_id,
        server_index=server.index,
        address=server.address,
        metrics_address=server.metrics_address,
        alive=server.alive,
        role=_ROLES[server.role],
        in_sync=server.in_sync,
        draining=server.index in state.moves.draining,
        partitions=share.partitions,
        value_bytes=share.nbytes,
    )
