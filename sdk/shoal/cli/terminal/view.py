"""Formats a job for a terminal or as JSON. Pure: converts the client's values to tables and
dictionaries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from shoal.cli.terminal.table import Column, FittingTable
from shoal.client import (
    Event,
    Job,
    JobEnding,
    JobPhase,
    JobSummary,
    Machine,
    Member,
    MemberPhase,
    PastRun,
    Result,
    Server,
    ServerRole,
)

_PHASE_STYLES: Final = {
    MemberPhase.RANKED: "green",
    MemberPhase.DRAINING: "yellow",
    MemberPhase.QUARANTINED: "red",
    MemberPhase.READY: "cyan",
    MemberPhase.JOINED: "cyan",
    JobPhase.RUNNING: "green",
    JobPhase.WAITING: "cyan",
    JobPhase.STOPPING: "yellow",
}
_NOTHING: Final = "-"
_SHORT_ID: Final = 8
_LONG: Final = timedelta(seconds=2)
_MOST_PAST_RUNS: Final = 5


def job_view(job: Job) -> RenderableType:
    """Returns a view of a job: a headline, and tables of members and servers."""
    parts: list[RenderableType] = [_headline(job)]
    if (progress := _progress(job)) is not None:
        parts.append(Text(progress))
    if job.waits_for:
        parts.append(Text(job.waits_for, style="yellow"))
    if job.ending_reason and job.ending is not JobEnding.COMPLETED:
        parts.append(Text(job.ending_reason, style="yellow"))
    parts += [Text(_machine(machine, job.now), style="red") for machine in job.machines]
    if job.members:
        parts.append(_member_table(job))
        # a note shared by several ranks is shown once
        notes = dict.fromkeys(_note(member) for member in job.members if member.note)
        parts += [Text(note, style="yellow") for note in notes]
        parts += _diagnosis(job)
    elif job.phase is JobPhase.WAITING:
        hint = (
            "no members yet: a worker joins when its script calls shoal.init(), which a "
            "plain torchrun script never does"
        )
        parts.append(Text("no members left" if job.generation else hint, style="dim"))
    if job.servers:
        parts.append(_server_table(job))
    parts += [
        Text(_past_run(past, job.now), style="dim") for past in job.past_runs[-_MOST_PAST_RUNS:]
    ]
    return Group(*parts)


def jobs_view(jobs: Sequence[JobSummary], *, shown: str | None = None) -> RenderableType:
    """Returns a table of jobs. `shown`: id of the job whose details are displayed as well; it is
    marked in the table."""
    return FittingTable(
        Column(
            "job",
            [Text(job.job_id, style="bold" if job.job_id == shown else "") for job in jobs],
            right=False,
        ),
        Column("phase", [_phase(job.phase) for job in jobs], right=False),
        Column("generation", [str(job.generation or _NOTHING) for job in jobs]),
        Column("ranks", [str(job.world_size or _NOTHING) for job in jobs]),
        Column("ended", [_ended(job.result) for job in jobs], right=False),
    )


def _ended(result: Result | None) -> Text:
    if result is None:
        return Text(_NOTHING)
    if result.ok:
        return Text("succeeded", style="green")
    return Text(
        "killed" if result.exit_status is None else f"with status {result.exit_status}", style="red"
    )


def event_line(event: Event) -> Text:
    """Returns an event as one line: time, kind, generation, member, and further attributes."""
    parts = [f" {name}={_quoted(value)}" for name, value in event.attributes.items() if value]
    line = Text(_clock(event.at), style="dim")
    line.append(f"  {event.kind}", style="not dim bold")
    if event.generation:
        line.append(f"  generation {event.generation}", style="not dim")
    if event.member_id:
        line.append(f"  member {event.member_id[:_SHORT_ID]}", style="not dim")
    return line.append(" " + "".join(parts), style="not dim") if parts else line


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if " " in value else value


def _clock(moment: datetime) -> str:
    return moment.astimezone().strftime("%H:%M:%S.%f")[:-3]


def _headline(job: Job) -> Text:
    ranked = sum(member.rank is not None for member in job.members)
    run = f", run {job.run}" if job.run > 1 else ""
    text = Text.assemble(
        (f"job {job.job_id}", "bold"), f"{run}  {job.phase}, generation {job.generation}"
    )
    if job.phase is not JobPhase.FINISHED:
        text.append(f", {ranked} of {job.max_workers} workers have a rank")
    elif job.ending is not None:
        text.append(f", {job.ending}{_stopped_at(job)}")
    return text


def _stopped_at(job: Job) -> str:
    """Returns text with the last step of an incomplete run; empty if the step is unknown or the run
    completed."""
    if job.ending is JobEnding.COMPLETED or not job.steps:
        return ""
    total = f" of {job.steps_in_all:,}" if job.steps_in_all is not None else ""
    return f" at step {job.steps:,}{total}"


def _progress(job: Job) -> str | None:
    """Returns a line with the current step, the total number of steps and the remaining time; None
    if the total is unknown."""
    ranked = [member for member in job.members if member.rank is not None]
    newest = max(ranked, key=lambda member: member.step, default=None)
    if newest is None or newest.steps_in_all is None or job.phase is JobPhase.FINISHED:
        return None
    step, total = newest.step, newest.steps_in_all
    text = f"step {step:,} of {total:,} ({min(1.0, step / total):.0%})"
    if step < total and newest.step_time:
        text += f", {_whole((total - step) * newest.step_time)} left"
    return text


def _past_run(past: PastRun, now: datetime) -> str:
    why = f": {past.reason}" if past.reason else ""
    return (
        f"run {past.number} {past.ending} {_whole(now - past.ended)} ago, after "
        f"{_whole(past.ended - past.began)}{why}"
    )


def _machine(machine: Machine, now: datetime) -> str:
    return (
        f"machine {machine.host} is {machine.condition} since {_whole(now - machine.since)}: "
        f"{machine.reason}"
    )


def _whole(duration: timedelta) -> timedelta:
    return timedelta(seconds=max(0, duration // timedelta(seconds=1)))


def _note(member: Member) -> str:
    who = (
        f"rank {member.rank} ({member.host})"
        if member.rank is not None
        else f"member {member.member_id} ({member.host})"
    )
    return member.note or "" if who in (member.note or "") else f"{who}: {member.note}"


def _diagnosis(job: Job) -> list[RenderableType]:
    """Returns a description of what each rank is doing, with its stacks; empty unless a step is
    stalled. The ranks that others are waiting for come first. Ranks with the same stacks are shown
    together."""
    groups: dict[tuple[bool, str, str], list[str]] = {}
    for member in job.members:
        if member.stacks and member.rank is not None:
            does = (member.waiting > timedelta(), _what_it_does(member), member.stacks)
            groups.setdefault(does, []).append(f"{member.rank} ({member.host})")
    parts: list[RenderableType] = []
    for (_, what, stacks), ranks in sorted(groups.items()):
        parts.append(Text(f"rank{'s'[: len(ranks) > 1]} {', '.join(ranks)}: {what}", style="bold"))
        parts.append(Text(stacks, style="dim"))
    return parts


def _what_it_does(member: Member) -> str:
    waits = f"waiting in {member.waiting_in}" if member.waiting else ""
    after = f"; last completed: {member.last_wait}" if member.last_wait else ""
    return f"{waits or member.script_line or 'running code of the script'}{after}"


def _phase(phase: MemberPhase | JobPhase) -> Text:
    shown = "active" if phase == MemberPhase.RANKED else phase
    return Text(shown, style=_PHASE_STYLES.get(phase, ""))


def _member_table(job: Job) -> FittingTable:
    members = job.members
    asynchronous = any(member.staleness for member in members)
    return FittingTable(
        Column(
            "rank", [_NOTHING if member.rank is None else str(member.rank) for member in members]
        ),
        Column("phase", [_phase(member.phase) for member in members], dispensable=1, right=False),
        Column("host", [member.host for member in members], dispensable=2, right=False),
        Column("pid", [str(member.pid) for member in members], dispensable=3),
        Column("epoch", [str(member.epoch) for member in members]),
        Column("step", [str(member.step) for member in members]),
        Column(
            "samples/s",
            [
                f"{member.samples_per_s:,.0f}" if member.samples_per_s else _NOTHING
                for member in members
            ],
        ),
        Column(
            "loss",
            [
                _NOTHING if member.loss is None or not member.step else f"{member.loss:.4g}"
                for member in members
            ],
        ),
        *(
            Column(
                name,
                [
                    f"{member.metrics[name]:.4g}" if name in member.metrics else _NOTHING
                    for member in members
                ],
                dispensable=4 + place,
            )
            for place, name in enumerate(_metric_names(members))
        ),
        *(
            (
                Column(
                    "share",
                    [f"{member.share:.2f}" if member.share else _NOTHING for member in members],
                    dispensable=4,
                ),
            )
            if any(member.share for member in members)
            else ()
        ),
        *(
            (
                Column(
                    "to upload",
                    [
                        f"{member.upload_backlog_bytes / (1 << 20):,.1f} MiB"
                        if member.upload_backlog_bytes
                        else _NOTHING
                        for member in members
                    ],
                    dispensable=4,
                ),
            )
            if any(member.upload_backlog_bytes for member in members)
            else ()
        ),
        Column("step time", [_milliseconds(member.step_time) for member in members]),
        Column("waiting", [_waiting(member) for member in members]),
        *(
            (Column("staleness", [f"{member.staleness:.0f}" for member in members]),)
            if asynchronous
            else ()
        ),
    )


def _metric_names(members: Sequence[Member]) -> list[str]:
    """Returns the names of all metrics reported by any member, in order of first appearance."""
    return list(dict.fromkeys(name for member in members for name in member.metrics))


def _milliseconds(duration: timedelta) -> str:
    return f"{duration / timedelta(milliseconds=1):.1f} ms" if duration else _NOTHING


def _waiting(member: Member) -> str:
    """Returns the duration of a member's current wait for its peers if it is long; otherwise the
    fraction of its step time spent waiting."""
    if member.waiting >= _LONG:
        return f"{member.waiting.total_seconds():.0f} s"
    if not member.step_time or not member.busy_time:
        return _NOTHING
    return f"{max(0.0, 1 - member.busy_time / member.step_time):.0%}"


def _server_table(job: Job) -> FittingTable:
    servers = job.servers
    return FittingTable(
        Column("server", [str(server.place) for server in servers]),
        Column("role", [server.role for server in servers], dispensable=1, right=False),
        Column("id", [server.server_id for server in servers], right=False),
        Column(
            "address",
            [server.address or _NOTHING for server in servers],
            dispensable=2,
            right=False,
        ),
        Column("state", [_server_state(server) for server in servers], right=False),
        Column("partitions", [str(server.partitions) for server in servers]),
        Column("values", [f"{server.value_bytes / (1 << 20):,.1f} MiB" for server in servers]),
    )


def _server_state(server: Server) -> Text:
    state = Text("alive", style="green") if server.alive else Text("gone", style="red")
    if server.alive and server.role is ServerRole.BACKUP:
        state = (
            Text("in sync", style="green")
            if server.in_sync
            else Text("catching up", style="yellow")
        )
    if server.draining:
        state.append(", draining", style="yellow")
    return state


def job_json(job: Job) -> dict[str, Any]:
    """Returns the job as a JSON-compatible dictionary. Unknown numbers are null. Times are
    milliseconds since the Unix epoch, by the Redis server's clock."""
    return {
        "job_id": job.job_id,
        "run": job.run,
        "phase": job.phase,
        "ending": job.ending,
        "ending_reason": job.ending_reason,
        "newest_step": job.steps,
        "steps_in_all": job.steps_in_all,
        "generation": job.generation,
        "world_size": job.world_size,
        "min_workers": job.min_workers,
        "max_workers": job.max_workers,
        "now_unix_ms": _unix_ms(job.now),
        "waits_for": job.waits_for,
        "members": [_member_json(member) for member in job.members],
        "servers": [
            {
                "server_index": server.place,
                "role": server.role,
                "in_sync": server.in_sync,
                "server_id": server.server_id,
                "address": server.address,
                "metrics_address": server.metrics_address,
                "alive": server.alive,
                "draining": server.draining,
                "partitions": server.partitions,
                "value_bytes": server.value_bytes,
            }
            for server in job.servers
        ],
        "machines": [
            {
                "host": machine.host,
                "condition": machine.condition,
                "reason": machine.reason,
                "since_unix_ms": _unix_ms(machine.since),
            }
            for machine in job.machines
        ],
        "past_runs": [
            {
                "run": past.number,
                "began_unix_ms": _unix_ms(past.began),
                "ended_unix_ms": _unix_ms(past.ended),
                "ending": past.ending,
                "reason": past.reason,
            }
            for past in job.past_runs
        ],
    }


def summary_json(job: JobSummary) -> dict[str, Any]:
    """Returns an entry of a list of jobs as a JSON-compatible dictionary."""
    result = job.result
    return {
        "job_id": job.job_id,
        "phase": job.phase,
        "generation": job.generation,
        "world_size": job.world_size,
        "result": None
        if result is None
        else {"ok": result.ok, "exit_status": result.exit_status, "summary": result.summary},
    }


def event_json(event: Event) -> dict[str, Any]:
    """Returns an event as a JSON-compatible dictionary."""
    return {
        "event_id": event.event_id,
        "unix_ms": _unix_ms(event.at),
        "kind": event.kind,
        "generation": event.generation,
        "member_id": event.member_id,
        "attributes": dict(event.attributes),
    }


def _unix_ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _member_json(member: Member) -> dict[str, Any]:
    return {
        "rank": member.rank,
        "phase": member.phase,
        "member_id": member.member_id,
        "host": member.host,
        "pid": member.pid,
        "metrics_address": member.metrics_address,
        "joined_unix_ms": _unix_ms(member.joined),
        "step": member.step,
        "steps_in_all": member.steps_in_all,
        "epoch": member.epoch,
        "samples": member.samples,
        "samples_per_s": member.samples_per_s,
        "loss": member.loss,
        "metrics": dict(member.metrics),
        "step_time_s": member.step_time.total_seconds(),
        "staleness": member.staleness,
        "share": member.share,
        "upload_backlog_bytes": member.upload_backlog_bytes,
        "busy_time_s": member.busy_time.total_seconds(),
        "waiting_s": member.waiting.total_seconds(),
        "waiting_in": member.waiting_in,
        "script_line": member.script_line,
        "last_wait": member.last_wait,
        "stacks": member.stacks,
        "note": member.note,
    }
