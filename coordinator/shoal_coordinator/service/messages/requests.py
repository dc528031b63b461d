"""Parses requests. Each function converts a message to immutable, valid values, or raises
InvalidRequestError. The core decides whether a request is allowed in the current state of its
job."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from shoal_common.errors import InvalidRequestError, StaleGenerationError
from shoal_common.rpc.server_interceptor import member_key
from shoal_common.security.authentication import member_key_digest
from shoal_common.tables.declaration import TableSpec, wrong_shape
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_coordinator.membership.model.events import (
    BackupReported,
    BatchesLeased,
    CollectiveFailed,
    DrainRequested,
    ExitReported,
    LeaveReason,
    MachineReported,
    MemberJoined,
    MemberLeft,
    MoveReported,
    OfRun,
    RunWanted,
    ServerDrainRequested,
    ServerRegistered,
    StopRequested,
    TensorsDeclared,
)
from shoal_coordinator.membership.model.pulse import Progress
from shoal_coordinator.membership.model.replicas import Replicas
from shoal_coordinator.membership.model.shards import ITEM_BYTES, TensorSpec
from shoal_coordinator.membership.model.spec import (
    DEFAULT_LEASE_MS,
    DEFAULT_STALL_TIMEOUT_MS,
    LARGEST_WORLD,
    MOST_SERVERS,
    JobSpec,
)
from shoal_coordinator.membership.model.state import (
    Generation,
    Identity,
    JobEnding,
    JobState,
    MachineCondition,
    RunId,
)
from shoal_coordinator.service.messages import checks
from shoal_coordinator.service.messages.checks import number, wrong

LONGEST_DETAIL: Final = 1024
_MOST_TENSORS: Final = 100_000
_MOST_DIMENSIONS: Final = 64
_MOST_WANTED: Final = 1024
_MOST_FINISHED: Final = 65_536
_MOST_GROUPS: Final = 1024
_LONGEST_GROUP: Final = 256
_LONGEST_BATCH_MS: Final = 86_400_000
_LEAVE_REASONS: Final = {
    pb.Leave.REASON_DRAINED: LeaveReason.DRAINED,
    pb.Leave.REASON_FINISHED: LeaveReason.FINISHED,
    pb.Leave.REASON_FAILED: LeaveReason.FAILED,
}
_STOPS: Final = {
    pb.JOB_ENDING_UNSPECIFIED: JobEnding.STOPPED,
    pb.JOB_ENDING_STOPPED: JobEnding.STOPPED,
    pb.JOB_ENDING_COMPLETED: JobEnding.COMPLETED,
    pb.JOB_ENDING_FAILED: JobEnding.FAILED,
}
_REPORTED_CONDITIONS: Final = {
    pb.MACHINE_CONDITION_HEALTHY: MachineCondition.HEALTHY,
    pb.MACHINE_CONDITION_LEAVING: MachineCondition.LEAVING,
    pb.MACHINE_CONDITION_UNHEALTHY: MachineCondition.UNHEALTHY,
}
_LONGEST_NAME: Final = 64
_LONGEST_SCRIPT_LINE: Final = 384
_LONGEST_STACKS: Final = 4096
_MOST_OBSERVED: Final = 16
_MOST_OUT_OF_REACH: Final = 64
_MOST_METRICS: Final = 16
_NO_METRICS: Final[Mapping[str, float]] = {}
_LONGEST_S: Final = 1e9
_EVENT_ID: Final = re.compile(r"[0-9]{1,19}(-[0-9]{1,19})?")


def parse_creation(message: pb.CreateJobRequest) -> RunWanted:
    """Parses a request to create a job or to start, join or resume one of its runs."""
    run = parse_run(message.run)
    # The start time of a run begun under an older release is unknown.
    if message.follow and (run is None or message.resume):
        raise InvalidRequestError("follow: expected the run to follow, without resume")
    return RunWanted(
        spec=parse_spec(message.spec), run=run, resume=message.resume, follow=message.follow
    )


def parse_run(message: pb.RunId) -> RunId | None:
    """Returns the run that a caller belongs to or requests; None for the newest run."""
    if message.number == 0 and message.began_unix_ms == 0:
        return None
    return RunId(
        number=number("run.number", message.number, low=1),
        began_unix_ms=number("run.began_unix_ms", message.began_unix_ms),
    )


def of_run(message: pb.RunId, event: Any) -> Any:
    """Wraps an event in OfRun if `message` names a run; otherwise returns the event unchanged."""
    run = parse_run(message)
    return event if run is None else OfRun(run=run, event=event)


def parse_spec(message: pb.JobSpec) -> JobSpec:
    """Parses a job's specification and fills in the defaults."""
    smallest = number("min_workers", message.min_workers, low=1, high=LARGEST_WORLD)
    servers = number("parameter_servers", message.parameter_servers, high=MOST_SERVERS)
    return JobSpec(
        job_id=checks.job_id(message.job_id),
        min_workers=smallest,
        min_survivors=number("min_survivors", message.min_survivors, high=smallest),
        max_workers=number("max_workers", message.max_workers, low=smallest, high=LARGEST_WORLD),
        parameter_servers=servers,
        max_parameter_servers=number(
            "max_parameter_servers",
            message.max_parameter_servers or servers,
            low=servers,
            high=MOST_SERVERS,
        ),
        parameter_server_backups=number(
            "parameter_server_backups", message.parameter_server_backups, high=1
        ),
        join_grace_ms=number("join_grace_ms", message.join_grace_ms, high=600_000),
        lease_ms=number("lease_ms", message.lease_ms or DEFAULT_LEASE_MS, low=500, high=600_000),
        stall_timeout_ms=number(
            "stall_timeout_ms",
            message.stall_timeout_ms or DEFAULT_STALL_TIMEOUT_MS,
            low=1000,
            high=3_600_000,
        ),
    )


def parse_join(message: pb.Join) -> tuple[str, MemberJoined]:
    """Parses the first message of a member's session. Returns the job id and the event."""
    identity = Identity(
        member_id=checks.identifier("join.member_id", message.member_id),
        host=checks.host("join.host", message.host),
        pid=number("join.pid", message.pid, low=1),
        launcher_id=checks.identifier("join.launcher_id", message.launcher_id, required=False),
        local_index=number("join.local_index", message.local_index),
        donor_address=checks.address("join.donor_address", message.donor_address),
        donor_key=checks.secret("join.donor_key", message.donor_key),
        metrics_address=checks.address("join.metrics_address", message.metrics_address),
        key_digest=member_key_digest(member_key()),
    )
    event = MemberJoined(
        identity=identity,
        last_generation=number("join.last_generation", message.last_generation),
        last_world_size=number("join.last_world_size", message.last_world_size, high=LARGEST_WORLD),
        works_in=number("join.works_in", message.works_in),
    )
    return checks.job_id(message.job_id), event


def _metrics(message: pb.Progress) -> Mapping[str, float]:
    return {
        name[:_LONGEST_NAME]: value
        for name, value in itertools.islice(message.metrics.items(), _MOST_METRICS)
    }


def parse_heartbeat(message: pb.Heartbeat) -> tuple[int, Progress]:
    """Parses a heartbeat. Returns the member's current generation and its progress. Rates and
    losses are not checked, because they are only displayed. Invalid durations become 0.

    Because heartbeats are frequent, the counts are checked one by one only if one of them is
    negative.
    """
    received = message.progress
    counts = (
        message.generation,
        received.step,
        received.epoch,
        received.sequence,
        received.samples,
    )
    if min(counts) < 0:
        for name, count in zip(
            ("generation", "step", "epoch", "sequence", "samples"), counts, strict=True
        ):
            number(f"heartbeat.{name}", count)
    progress = Progress(
        step=received.step,
        steps_in_all=max(0, received.steps_in_all),
        epoch=received.epoch,
        sequence=received.sequence,
        samples_per_s=received.samples_per_s,
        loss=received.loss,
        step_time_s=received.step_time_s,
        samples=received.samples,
        staleness=received.staleness,
        waiting_s=_seconds(received.waiting_s),
        waiting_in=received.waiting_in[:_LONGEST_NAME] or "a collective",
        busy_time_s=_seconds(received.busy_time_s),
        cpu_s=_seconds(received.cpu_s),
        server_wait_s=_seconds(received.server_wait_s),
        awaited_server=received.awaited_server[:_LONGEST_NAME] or "a parameter server",
        script_line=received.script_line[:_LONGEST_SCRIPT_LINE],
        share=_seconds(received.share),
        upload_backlog_bytes=max(0, received.upload_backlog_bytes),
        last_wait=received.last_wait[:_LONGEST_NAME],
        stacks=received.stacks[:_LONGEST_STACKS],
        busy_link=(received.busy_link.rank, received.busy_link.bytes_per_s)
        if received.HasField("busy_link")
        else None,
        metrics=_metrics(received) if received.metrics else _NO_METRICS,
        in_reach=message.in_reach,
        spare=message.spare,
        out_of_reach=tuple(message.out_of_reach[:_MOST_OUT_OF_REACH]),
    )
    return message.generation, progress


def parse_observed(message: pb.Heartbeat) -> list[tuple[str, str, str]]:
    """Returns (member id, script line, stacks) for each member whose stacks the heartbeat's sender
    has read at the coordinator's request."""
    return [
        (
            each.member_id,
            each.script_line[:_LONGEST_SCRIPT_LINE],
            each.stacks[:_LONGEST_STACKS],
        )
        for each in message.observed[:_MOST_OBSERVED]
    ]


def _seconds(value: float) -> float:
    return value if 0 <= value < _LONGEST_S else 0.0


def parse_collective_failure(member_id: str, message: pb.CollectiveFailure) -> CollectiveFailed:
    """Parses a member's report of a failed collective."""
    if len(message.suspects) > LARGEST_WORLD:
        raise wrong(
            "collective_failure.suspects",
            f"{len(message.suspects)} ranks",
            f"at most {LARGEST_WORLD}",
        )
    return CollectiveFailed(
        member_id=member_id,
        generation=number("collective_failure.generation", message.generation, low=1),
        suspects=tuple(
            number("collective_failure.suspects", rank, high=LARGEST_WORLD - 1)
            for rank in message.suspects
        ),
        timed_out=message.timed_out,
        detail=checks.text("collective_failure.detail", message.detail, longest=LONGEST_DETAIL),
    )


def parse_leave(member_id: str, message: pb.Leave) -> MemberLeft:
    """Parses a member's Leave message."""
    reason = _LEAVE_REASONS.get(message.reason)
    if reason is None:
        raise wrong(
            "leave.reason", message.reason, "REASON_DRAINED, REASON_FINISHED or REASON_FAILED"
        )
    detail = checks.text("leave.detail", message.detail, longest=LONGEST_DETAIL)
    return MemberLeft(
        member_id=member_id,
        reason=reason,
        detail=detail,
        alone=message.alone,
        steps=number("leave.steps", message.steps),
        replicas=_parse_replicas(message.replicas) if message.HasField("replicas") else None,
    )


def _parse_replicas(message: pb.Replicas) -> Replicas:
    if len(message.digests) > _MOST_GROUPS:
        raise wrong(
            "leave.replicas.digests", f"{len(message.digests)} groups", f"at most {_MOST_GROUPS}"
        )
    digests = {
        checks.text("leave.replicas.digests", group, longest=_LONGEST_GROUP, required=True): digest
        for group, digest in sorted(message.digests.items())
    }
    return Replicas(
        generation=number("leave.replicas.generation", message.generation, low=1),
        step=number("leave.replicas.step", message.step, low=1),
        agreed=number("leave.replicas.agreed", message.agreed),
        digests=digests,
    )


def parse_exit(message: pb.ReportExitRequest) -> ExitReported:
    """Parses a launcher's report that a process has exited."""
    return ExitReported(
        member_id=checks.identifier("member_id", message.member_id),
        exit_code=number("exit_code", message.exit_code, high=255),
        signal=number("signal", message.signal, high=127),
        failure=checks.text("failure", message.failure, longest=LONGEST_DETAIL),
        finished=message.finished,
    )


def parse_machine(message: pb.ReportMachineRequest) -> MachineReported:
    """Parses a report of a machine's condition."""
    condition = _REPORTED_CONDITIONS.get(message.condition)
    if condition is None:
        raise wrong("condition", message.condition, "HEALTHY, LEAVING or UNHEALTHY")
    return MachineReported(
        host=checks.host("host", message.host),
        condition=condition,
        reason=checks.text("reason", message.reason, longest=LONGEST_DETAIL)
        or f"reported as {condition}",
    )


def parse_drain(message: pb.DrainMemberRequest) -> DrainRequested:
    """Parses a request to drain a member."""
    reason = checks.text("reason", message.reason, longest=LONGEST_DETAIL) or "drained"
    which = message.WhichOneof("member")
    if which == "member_id":
        return DrainRequested(
            member_id=checks.identifier("member_id", message.member_id), rank=None, reason=reason
        )
    if which == "rank":
        return DrainRequested(
            member_id=None, rank=number("rank", message.rank, high=LARGEST_WORLD - 1), reason=reason
        )
    raise InvalidRequestError(
        "neither member_id nor rank is set; set one of them to identify the member that "
        "should leave"
    )


def parse_job_filter(message: pb.GetJobRequest) -> tuple[str, int]:
    """Returns the two filters on the members in the response: a member id, and an exclusive upper
    bound on the step. "" and 0 mean no filter."""
    member_id = checks.identifier("member_id", message.member_id, required=False)
    below_step = number("below_step", message.below_step)
    if member_id and below_step:
        raise InvalidRequestError(
            f"member_id={member_id!r} and below_step={below_step}: expected only one of them"
        )
    return member_id, below_step


def parse_ranks(message: pb.GetRanksRequest, state: JobState) -> tuple[Generation, Sequence[int]]:
    """Returns the newest generation and the requested ranks; an empty list means all ranks. Raises
    StaleGenerationError if the request is for a different generation."""
    number("generation", message.generation, low=1, high=checks.LARGEST_INT64)
    generation = state.generation
    if generation is None or (message.generation, message.nonce) != (
        generation.number,
        generation.nonce,
    ):
        newest = (
            "none yet"
            if generation is None
            else (f"{generation.number}, with a nonce that only its members know")
        )
        raise StaleGenerationError(
            f"generation={message.generation}: the newest generation of job "
            f"{state.spec.job_id} is {newest}; wait for it in the member's session"
        )
    world_size = len(generation.ranks)
    if len(message.ranks) > world_size:
        raise InvalidRequestError(
            f"{len(message.ranks)} ranks were requested, but generation {generation.number} has "
            f"only {world_size}"
        )
    return generation, [number("ranks", rank, high=world_size - 1) for rank in message.ranks]


def parse_stop(message: pb.StopJobRequest) -> StopRequested:
    """Parses a request to stop a job."""
    ending = _STOPS.get(message.ending)
    if ending is None:
        raise wrong(
            "ending",
            message.ending,
            "JOB_ENDING_COMPLETED, JOB_ENDING_FAILED, JOB_ENDING_STOPPED or none",
        )
    return StopRequested(
        reason=checks.text("reason", message.reason, longest=LONGEST_DETAIL) or "stopped",
        ending=ending,
    )


def parse_registration(message: pb.RegisterServer) -> tuple[str, ServerRegistered]:
    """Parses the first message of a parameter server's session. Returns the job id and the
    event."""
    registered = ServerRegistered(
        server_id=checks.identifier("register.server_id", message.server_id),
        address=checks.address("register.address", message.address),
        metrics_address=checks.address("register.metrics_address", message.metrics_address),
        host=checks.host("register.host", message.host),
        pid=number("register.pid", message.pid, low=1),
        incarnation=checks.text("register.incarnation", message.incarnation, longest=64),
        generation=number("register.generation", message.generation),
        held_index=number("register.held_place", message.held_place, high=MOST_SERVERS) - 1
        if message.held_place
        else None,
    )
    return checks.job_id(message.job_id), registered


def parse_backup_report(server_id: str, message: pb.BackupReport) -> BackupReported:
    """Parses a primary's report on its backup."""
    return BackupReported(
        server_id=server_id,
        epoch=number("backup.epoch", message.epoch, low=1),
        in_sync=message.in_sync,
        reason=checks.text("backup.reason", message.reason, longest=LONGEST_DETAIL),
    )


def parse_move_report(server_id: str, message: pb.MoveReport) -> MoveReported:
    """Parses a giver's report on a move of partitions."""
    return MoveReported(
        server_id=server_id,
        move=number("move.move", message.move, low=1),
        taken=message.taken,
        receiver_incarnation=checks.text(
            "move.receiver_incarnation",
            message.receiver_incarnation,
            longest=64,
            required=message.taken,
        ),
        reason=checks.text("move.reason", message.reason, longest=LONGEST_DETAIL),
        giver_failed=message.giver_failed,
    )


def parse_server_drain(message: pb.DrainServerRequest) -> ServerDrainRequested:
    """Parses a request to drain a parameter server."""
    return ServerDrainRequested(
        server_id=checks.identifier("server_id", message.server_id),
        reason=checks.text("reason", message.reason, longest=LONGEST_DETAIL) or "asked to",
    )


def parse_tensors(message: pb.DeclareTensorsRequest) -> TensorsDeclared:
    """Parses a worker's declaration of its model's tensors."""
    if not 1 <= len(message.tensors) <= _MOST_TENSORS:
        raise wrong("tensors", f"{len(message.tensors)} tensors", f"1 to {_MOST_TENSORS}")
    tensors = tuple(_parse_tensor(tensor) for tensor in message.tensors)
    names = {tensor.name for tensor in tensors}
    if len(names) < len(tensors):
        repeated = _first_repeated(tensor.name for tensor in tensors)
        raise wrong("tensors.name", repeated, "names that are unique in the job")
    return TensorsDeclared(tensors=tensors)


def parse_lease(message: pb.LeaseBatchesRequest) -> BatchesLeased:
    """Parses a request that acknowledges finished batches and asks for more."""
    if len(message.finished) > _MOST_FINISHED:
        raise wrong(
            "finished", f"{len(message.finished)} batches", f"at most {_MOST_FINISHED} at once"
        )
    if len(message.returned) > _MOST_FINISHED:
        raise wrong(
            "returned", f"{len(message.returned)} batches", f"at most {_MOST_FINISHED} at once"
        )
    batches_in_epoch = number("batches_in_epoch", message.batches_in_epoch)
    return BatchesLeased(
        member_id=checks.identifier("member_id", message.member_id),
        loader=checks.text("loader", message.loader, longest=256, required=True),
        epoch=number("epoch", message.epoch),
        batches_in_epoch=batches_in_epoch,
        want=number("want", message.want, high=_MOST_WANTED),
        finished=tuple(
            number("finished", batch, high=batches_in_epoch - 1) for batch in message.finished
        ),
        sequence=number("sequence", message.sequence),
        keep=message.keep,
        returned=tuple(
            number("returned", batch, high=max(0, batches_in_epoch - 1))
            for batch in message.returned
        ),
        batch_ms=number("batch_ms", message.batch_ms, high=_LONGEST_BATCH_MS),
    )


def parse_event_id(value: str) -> str:
    """Checks an event id received from a client. Returns "0", the position before the oldest event,
    for an empty id."""
    if not value:
        return "0"
    if not _EVENT_ID.fullmatch(value):
        raise wrong("after_event_id", value, 'an event_id as received, or "" for the oldest')
    return value


def _parse_tensor(message: pb.TensorSpec) -> TensorSpec:
    name = checks.text("tensors.name", message.name, longest=512, required=True)
    if message.dtype not in ITEM_BYTES:
        raise wrong(f"dtype of tensor {name!r}", message.dtype, f"one of {', '.join(ITEM_BYTES)}")
    if len(message.shape) > _MOST_DIMENSIONS:
        raise wrong(
            f"shape of tensor {name!r}",
            f"{len(message.shape)} dimensions",
            f"at most {_MOST_DIMENSIONS}",
        )
    shape = tuple(number(f"shape of tensor {name!r}", size) for size in message.shape)
    table = _parse_table(name, shape, message) if message.HasField("table") else None
    tensor = TensorSpec(
        name=name,
        shape=shape,
        dtype=message.dtype,
        frozen=message.frozen,
        apart=message.apart,
        table=table,
    )
    number(f"elements of tensor {name!r}", tensor.elements)
    return tensor


def _parse_table(name: str, shape: tuple[int, ...], message: pb.TensorSpec) -> TableSpec:
    table = TableSpec.of_message(message.table)
    if message.dtype != "float32" or message.frozen or message.apart:
        raise InvalidRequestError(
            f"table {name!r}: expected dtype='float32', frozen=false and apart=false"
        )
    if problem := wrong_shape(shape) or table.contradiction():
        raise InvalidRequestError(f"table {name!r}: {problem}")
    return table


def _first_repeated(names: Iterable[str]) -> str:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    raise AssertionError("the caller found a repeated name")
