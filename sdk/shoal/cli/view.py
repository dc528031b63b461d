"""How a job looks on a terminal and as JSON. Pure: from the coordinator's answer to tables and plain values."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from shoal_protos.v1 import coordinator_pb2 as pb

_PHASE_STYLES: Final = {"ranked": "green", "draining": "yellow", "quarantined": "red", "ready": "cyan", "joined": "cyan"}
_NOTHING: Final = "-"
_ROLES: Final = {pb.SERVER_ROLE_PRIMARY: "primary", pb.SERVER_ROLE_BACKUP: "backup"}
_LONG_S: Final = 2.0
_MOST_PAST_RUNS: Final = 5


def job_phase(job: pb.GetJobResponse) -> str:
    return str(pb.JobPhase.Name(job.phase)).removeprefix("JOB_PHASE_").lower()


def member_phase(member: pb.MemberStatus) -> str:
    return str(pb.MemberPhase.Name(member.phase)).removeprefix("MEMBER_PHASE_").lower()


def job_view(job: pb.GetJobResponse) -> RenderableType:
    """A headline and tables of members and servers."""
    parts: list[RenderableType] = [_headline(job)]
    if job.waits_for:
        parts.append(Text(job.waits_for, style="yellow"))
    if job.members:
        parts.append(_member_table(job))
        notes = dict.fromkeys(_note(member) for member in job.members if member.note)  # the same one of two ranks is said once
        parts += [Text(note, style="yellow") for note in notes]
    elif job.phase == pb.JOB_PHASE_WAITING:
        hint = "no members yet: workers join when their script calls shoal.init(); a plain torchrun script never does"
        parts.append(Text("no members any more" if job.generation.number else hint, style="dim"))
    if job.servers:
        parts.append(_server_table(job))
    parts += [Text(_past_run(past, job.now_unix_ms), style="dim") for past in job.past_runs[-_MOST_PAST_RUNS:]]
    return Group(*parts)


def _headline(job: pb.GetJobResponse) -> Text:
    ranked = sum(member.rank >= 0 for member in job.members)
    run = f", run {job.run.number}" if job.run.number > 1 else ""
    text = Text.assemble((f"job {job.spec.job_id}", "bold"), f"{run}  {job_phase(job)}, generation {job.generation.number}")
    if job.phase != pb.JOB_PHASE_FINISHED:
        text.append(f", {ranked} of {job.spec.max_workers} workers have a rank")
    return text


def run_ending(ending: pb.JobEnding) -> str:
    """completed, stopped or failed."""
    return str(pb.JobEnding.Name(ending)).removeprefix("JOB_ENDING_").lower()


def _past_run(past: pb.RunStatus, now_unix_ms: int) -> str:
    ago = timedelta(seconds=max(0, now_unix_ms - past.ended_unix_ms) // 1000)
    took = timedelta(seconds=max(0, past.ended_unix_ms - past.run.began_unix_ms) // 1000)
    why = f": {past.ending_reason}" if past.ending_reason else ""
    return f"run {past.run.number} {run_ending(past.ending)} {ago} ago, after {took}{why}"


def _note(member: pb.MemberStatus) -> str:
    who = f"rank {member.rank} ({member.host})" if member.rank >= 0 else f"member {member.member_id} ({member.host})"
    return str(member.note) if who in member.note else f"{who}: {member.note}"


def _member_table(job: pb.GetJobResponse) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rank", justify="right")
    for name in ("phase", "host"):
        table.add_column(name)
    for name in ("pid", "generation", "epoch", "step", "samples/s", "loss", "step time", "waiting"):
        table.add_column(name, justify="right")
    asynchronous = any(member.progress.staleness for member in job.members)
    if asynchronous:
        table.add_column("staleness", justify="right")
    for member in job.members:
        phase = member_phase(member)
        row = [
            str(member.rank) if member.rank >= 0 else _NOTHING,
            Text(phase, style=_PHASE_STYLES.get(phase, "")),
            member.host,
            str(member.pid),
            str(job.generation.number) if member.rank >= 0 else _NOTHING,
            *_progress_cells(member.progress),
        ]
        if asynchronous:
            row.append(f"{member.progress.staleness:.0f}")
        table.add_row(*row)
    return table


def _progress_cells(progress: pb.Progress) -> list[str]:
    return [
        str(progress.epoch),
        str(progress.step),
        f"{progress.samples_per_s:,.0f}" if progress.samples_per_s else _NOTHING,
        _NOTHING if math.isnan(progress.loss) or not progress.step else f"{progress.loss:.4g}",
        f"{progress.step_time_s * 1e3:.1f} ms" if progress.step_time_s else _NOTHING,
        _waiting(progress),
    ]


def _waiting(progress: pb.Progress) -> str:
    """For its peers: now, if it has for long; else the share of its steps."""
    if progress.waiting_s >= _LONG_S:
        return f"{progress.waiting_s:.0f} s"
    if not progress.step_time_s or not progress.busy_time_s:
        return _NOTHING
    return f"{max(0.0, 1 - progress.busy_time_s / progress.step_time_s):.0%}"


def _server_table(job: pb.GetJobResponse) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("server", "role", "id", "address", "state"):
        table.add_column(name)
    for name in ("partitions", "values"):
        table.add_column(name, justify="right")
    for server in job.servers:
        state = Text("alive", style="green") if server.alive else Text("gone", style="red")
        if server.alive and server.role == pb.SERVER_ROLE_BACKUP:
            state = Text("in sync", style="green") if server.in_sync else Text("catching up", style="yellow")
        if server.draining:
            state.append(", draining", style="yellow")
        table.add_row(
            str(server.server_index),
            _ROLES[server.role],
            server.server_id,
            server.address or _NOTHING,
            state,
            str(server.partitions),
            f"{server.value_bytes / (1 << 20):,.1f} MiB",
        )
    return table


def job_json(job: pb.GetJobResponse) -> dict[str, Any]:
    """The same as plain values. Unknown numbers are null; times are milliseconds of the Unix epoch, by the Redis server's clock."""
    spec = job.spec
    return {
        "job_id": spec.job_id,
        "run": job.run.number,
        "phase": job_phase(job),
        "generation": job.generation.number,
        "world_size": len(job.generation.ranks),
        "min_workers": spec.min_workers,
        "max_workers": spec.max_workers,
        "now_unix_ms": job.now_unix_ms,
        "waits_for": job.waits_for or None,
        "members": [_member_json(member) for member in job.members],
        "servers": [
            {
                "server_index": server.server_index,
                "role": _ROLES[server.role],
                "in_sync": server.in_sync,
                "server_id": server.server_id,
                "address": server.address or None,
                "metrics_address": server.metrics_address or None,
                "alive": server.alive,
                "draining": server.draining,
                "partitions": server.partitions,
                "value_bytes": server.value_bytes,
            }
            for server in job.servers
        ],
        "past_runs": [
            {
                "run": past.run.number,
                "began_unix_ms": past.run.began_unix_ms,
                "ended_unix_ms": past.ended_unix_ms,
                "ending": run_ending(past.ending),
                "reason": past.ending_reason or None,
            }
            for past in job.past_runs
        ],
    }


def _member_json(member: pb.MemberStatus) -> dict[str, Any]:
    progress = member.progress
    return {
        "rank": member.rank if member.rank >= 0 else None,
        "phase": member_phase(member),
        "member_id": member.member_id,
        "host": member.host,
        "pid": member.pid,
        "metrics_address": member.metrics_address or None,
        "joined_unix_ms": member.joined_unix_ms,
        "step": progress.step,
        "epoch": progress.epoch,
        "samples": progress.samples,
        "samples_per_s": progress.samples_per_s,
        "loss": None if math.isnan(progress.loss) else progress.loss,
        "step_time_s": progress.step_time_s,
        "staleness": progress.staleness,
        "busy_time_s": progress.busy_time_s,
        "waiting_s": progress.waiting_s,
        "waiting_in": progress.waiting_in or None,
        "note": member.note or None,
    }
