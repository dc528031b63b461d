"""Converts jobs, events and points to JSON-compatible values. Values that also occur in `shoal
status --json` have the same names there.

Unknown and missing values are null. Times are milliseconds since the Unix epoch, by the Redis
server's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

from shoal_coordinator.membership.model.observation import ObservedJob
from shoal_coordinator.membership.model.pulse import Progress
from shoal_coordinator.membership.model.shards import Share
from shoal_coordinator.membership.model.state import Member, PastRun, Server
from shoal_coordinator.page.history import Point
from shoal_coordinator.service.messages.responses import note_of
from shoal_coordinator.state.store import StoredEvent

MOST_MEMBERS: Final = 256
"""Maximum number of members listed per job. Members with a note come first, then the other members
by rank."""


def job_summary(job: ObservedJob) -> dict[str, Any]:
    """Returns the values shown for a job in the list of jobs."""
    state = job.state
    return {
        "job_id": state.spec.job_id,
        "run": state.run.number,
        "phase": state.phase,
        "ending": state.ending or None,
        "generation": state.number,
        "world_size": job.world_size,
        "newest_step": job.newest_step,
        "waits": bool(state.waits_for),
    }


def job_values(job: ObservedJob) -> dict[str, Any]:
    """Returns the values shown on a job's own page, except the job's events and history."""
    state, spec = job.state, job.state.spec
    places = {} if state.generation is None or not job.trains else state.generation.rank_of
    members = [
        _member(job, member, places.get(member.member_id)) for member in state.members.values()
    ]
    members.sort(
        key=lambda each: (
            not each["note"],
            each["rank"] is None,
            each["rank"],
            each["joined_unix_ms"],
            each["member_id"],
        )
    )
    shown = sorted(
        members[:MOST_MEMBERS],
        key=lambda each: (
            each["rank"] is None,
            each["rank"],
            each["joined_unix_ms"],
            each["member_id"],
        ),
    )
    return {
        "job_id": spec.job_id,
        "run": state.run.number,
        "began_unix_ms": state.run.began_unix_ms or None,
        "ended_unix_ms": state.ended_unix_ms or None,
        "phase": state.phase,
        "ending": state.ending or None,
        "ending_reason": state.stop_reason or None,
        "generation": state.number,
        "generation_cause": None if state.generation is None else state.generation.cause,
        "world_size": job.world_size,
        "min_workers": spec.min_workers,
        "max_workers": spec.max_workers,
        "now_unix_ms": job.now.unix_ms,
        "waits_for": state.waits_for or None,
        "newest_step": job.newest_step,
        "steps_in_all": job.steps_in_all or None,
        "without_progress_s": job.without_progress_s,
        "members": shown,
        "members_total": len(members),
        "machines": [
            {
                "host": host,
                "condition": machine.condition,
                "reason": machine.reason,
                "since_unix_ms": machine.since_unix_ms,
            }
            for host, machine in sorted(state.machines.items())
        ],
        "unserved_places": job.unserved_places,
        "unprotected_places": job.unprotected_places,
        "servers": [
            _server(job, server)
            for server in sorted(
                state.servers.values(), key=lambda one: (one.index, one.role != "primary")
            )
        ],
        "past_runs": [_past_run(past) for past in state.past_runs],
    }


def events_values(events: Iterable[StoredEvent]) -> list[dict[str, Any]]:
    """Returns the values of events, in the given order."""
    return [
        {
            "event_id": event.event_id,
            "unix_ms": event.unix_ms,
            "run": event.record.run,
            "kind": event.record.kind,
            "generation": event.record.generation,
            "member_id": event.record.member_id,
            "attributes": dict(event.record.attributes),
        }
        for event in events
    ]


def points_values(points: Iterable[Point]) -> list[list[float | None]]:
    """Returns each point as [unix_ms, step, loss, samples_per_s, ranks]."""
    return [
        [point.unix_ms, point.step, _finite(point.loss), point.samples_per_s, point.ranks]
        for point in points
    ]


def _member(job: ObservedJob, member: Member, rank: int | None) -> dict[str, Any]:
    identity, pulse = member.identity, job.pulses.members.get(member.member_id)
    progress = Progress() if pulse is None else pulse.progress
    return {
        "rank": rank,
        "phase": member.phase,
        "member_id": identity.member_id,
        "host": identity.host,
        "pid": identity.pid,
        "joined_unix_ms": member.joined_unix_ms,
        "step": progress.step,
        "steps_in_all": progress.steps_in_all or None,
        # In asynchronous training, workers count their own pushes, so a worker that joined later
        # has a lower count without being slower.
        "steps_behind": max(0, job.newest_step - progress.step)
        if rank is not None and not job.state.loaders
        else None,
        "epoch": progress.epoch,
        "samples": progress.samples,
        "samples_per_s": progress.samples_per_s,
        "loss": _finite(progress.loss) if progress.step else None,
        "metrics": {name: _finite(value) for name, value in progress.metrics.items()},
        "step_time_s": progress.step_time_s,
        "staleness": progress.staleness,
        "share": progress.share or None,
        "upload_backlog_bytes": progress.upload_backlog_bytes,
        "busy_time_s": progress.busy_time_s,
        "waiting_s": progress.waiting_s,
        "waiting_in": progress.waiting_in,
        "silent_s": None if pulse is None else pulse.silent_ms(job.now.ms) / 1000,
        "script_line": progress.script_line or None,
        "last_wait": progress.last_wait or None,
        "stacks": progress.stacks if member.member_id in job.explained else None,
        "note": note_of(job.state, member, pulse, job.now.ms) or None,
    }


def _server(job: ObservedJob, server: Server) -> dict[str, Any]:
    state = job.state
    share = (None if state.layout is None else state.layout.shares.get(server.index)) or Share(
        partitions=0, nbytes=0
    )
    pulse = job.pulses.servers.get(server.server_id)
    return {
        "server_index": server.index,
        "role": server.role,
        "in_sync": server.in_sync,
        "server_id": server.server_id,
        "address": server.address,
        "alive": server.alive,
        "draining": server.index in state.moves.draining,
        "partitions": share.partitions,
        "value_bytes": share.nbytes,
        "stored_bytes": pulse.stored_bytes if pulse is not None and server.alive else None,
    }


def _past_run(past: PastRun) -> dict[str, Any]:
    return {
        "run": past.run.number,
        "began_unix_ms": past.run.began_unix_ms or None,
        "ended_unix_ms": past.ended_unix_ms,
        "ending": past.ending,
        "reason": past.reason,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
