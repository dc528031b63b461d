"""Converts messages of the coordinator to the values that the client returns."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, TypeVar

from shoal_protos.v1 import coordinator_pb2 as pb

from shoal.client.event import Event
from shoal.client.job import (
    Job,
    JobEnding,
    JobPhase,
    JobSummary,
    Machine,
    MachineCondition,
    Member,
    MemberPhase,
    PastRun,
    Server,
    ServerRole,
)

_EnumT = TypeVar("_EnumT", bound=StrEnum)


def job_of(message: pb.GetJobResponse) -> Job:
    """Converts the message that describes a job, with its members and servers."""
    return Job(
        job_id=message.spec.job_id,
        run=message.run.number or 1,  # with an older coordinator, a job has a single run
        phase=_named(pb.JobPhase, message.phase, JobPhase),
        ending=_named(pb.JobEnding, message.ending, JobEnding) if message.ending else None,
        ending_reason=message.ending_reason or None,
        generation=message.generation.number,
        world_size=len(message.generation.ranks),
        min_workers=message.spec.min_workers,
        max_workers=message.spec.max_workers,
        members=tuple(map(member_of, message.members)),
        servers=tuple(map(server_of, message.servers)),
        waits_for=message.waits_for or None,
        past_runs=tuple(map(past_run_of, message.past_runs)),
        now=_moment(message.now_unix_ms),
        steps=message.newest_step,
        steps_in_all=message.steps_in_all or None,
        machines=tuple(map(machine_of, message.machines)),
    )


def past_run_of(message: pb.RunStatus) -> PastRun:
    """Converts the message that describes a finished run."""
    return PastRun(
        number=message.run.number,
        began=_moment(message.run.began_unix_ms),
        ended=_moment(message.ended_unix_ms),
        ending=_named(pb.JobEnding, message.ending, JobEnding),
        reason=message.ending_reason or None,
    )


def summary_of(message: pb.JobSummary) -> JobSummary:
    """Converts the message that describes a job in a list of jobs."""
    return JobSummary(
        job_id=message.job_id,
        phase=_named(pb.JobPhase, message.phase, JobPhase),
        generation=message.generation,
        world_size=message.world_size,
    )


def member_of(message: pb.MemberStatus) -> Member:
    """Converts the message that describes a member and its progress."""
    progress = message.progress
    return Member(
        member_id=message.member_id,
        phase=_named(pb.MemberPhase, message.phase, MemberPhase),
        rank=message.rank if message.rank >= 0 else None,
        host=message.host,
        pid=message.pid,
        metrics_address=message.metrics_address or None,
        joined=_moment(message.joined_unix_ms),
        step=progress.step,
        steps_in_all=progress.steps_in_all or None,
        epoch=progress.epoch,
        samples=progress.samples,
        samples_per_s=progress.samples_per_s,
        # A member that has not reported any progress has no loss either.
        loss=None
        if math.isnan(progress.loss) or not message.HasField("progress")
        else progress.loss,
        metrics={name: value for name, value in progress.metrics.items() if not math.isnan(value)},
        step_time=timedelta(seconds=progress.step_time_s),
        busy_time=timedelta(seconds=progress.busy_time_s),
        waiting=timedelta(seconds=progress.waiting_s),
        waiting_in=progress.waiting_in or None,
        staleness=progress.staleness,
        share=progress.share or None,
        upload_backlog_bytes=progress.upload_backlog_bytes,
        note=message.note or None,
        script_line=progress.script_line or None,
        last_wait=progress.last_wait or None,
        stacks=progress.stacks or None,
    )


def machine_of(message: pb.MachineStatus) -> Machine:
    """Converts the message that describes a machine with a condition (`MachineCondition`)."""
    return Machine(
        host=message.host,
        condition=_named(pb.MachineCondition, message.condition, MachineCondition),
        reason=message.reason,
        since=_moment(message.since_unix_ms),
    )


def server_of(message: pb.ServerStatus) -> Server:
    """Converts the message that describes a parameter server."""
    return Server(
        server_id=message.server_id,
        place=message.server_index,
        role=_named(pb.ServerRole, message.role, ServerRole),
        address=message.address or None,
        metrics_address=message.metrics_address or None,
        alive=message.alive,
        in_sync=message.in_sync,
        draining=message.draining,
        partitions=message.partitions,
        value_bytes=message.value_bytes,
    )


def event_of(message: pb.Event) -> Event:
    """Converts a protobuf event to an `Event`."""
    return Event(
        event_id=message.event_id,
        at=_moment(message.unix_ms),
        kind=message.kind,
        generation=message.generation,
        member_id=message.member_id or None,
        attributes=dict(sorted(message.attributes.items())),
    )


def _moment(unix_ms: int) -> datetime:
    return datetime.fromtimestamp(unix_ms / 1000, UTC)


def _named(enum: Any, number: int, kind: type[_EnumT]) -> _EnumT:
    """Converts a protobuf enum number to the corresponding member of a Python enum. A number that
    this version does not know, because the coordinator is newer, becomes UNKNOWN."""
    if number not in enum.values():
        return kind("unknown")
    value = enum.Name(number)
    return next((each for each in kind if value.endswith(f"_{each.name}")), kind("unknown"))
