"""Rules about a job's runs: when the next run starts, and which run a caller belongs to
(docs/explanation/membership.md#runs).

A run ends only when its script finishes, when it fails, or when it is stopped. Creating a job whose
newest run has not ended means joining that run. A run therefore continues when new processes are
started, even if all its earlier processes were killed. Creating a job whose newest run has ended
starts the next run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from shoal_common.errors import PreconditionError, UnavailableError

from shoal_coordinator.membership.members.leaving import member_lost
from shoal_coordinator.membership.model.draft import Draft
from shoal_coordinator.membership.model.effects import EndServerSession, EndSession, Record
from shoal_coordinator.membership.model.events import (
    Ending,
    MemberJoined,
    MemberLost,
    OfRun,
    RunWanted,
    ServerRegistered,
)
from shoal_coordinator.membership.model.reasons import Refusal
from shoal_coordinator.membership.model.spec import JobSpec
from shoal_coordinator.membership.model.state import (
    JobEnding,
    JobPhase,
    JobState,
    Now,
    PastRun,
    RunId,
)

_MOST_NAMED: Final = 5
_ENDED: Final = {
    JobEnding.COMPLETED: "was completed",
    JobEnding.STOPPED: "was stopped",
    JobEnding.FAILED: "failed",
    JobEnding.NONE: "ended",
}

Runs = Draft | JobState
"""A job's state, which records its runs."""


@dataclass(frozen=True, kw_only=True)
class RunGranted:
    """Outcome of a RunWanted event: the run that the caller takes part in."""

    run: RunId
    begun: bool
    """True if this event started the run, or resumed it after its end."""
    previous: PastRun | None


@dataclass(frozen=True, kw_only=True)
class RunEnding:
    """Outcome of a RunWanted event if the newest run has ended but some of its members have not
    left. The caller should retry."""

    why: str


def run_wanted(draft: Draft, event: RunWanted) -> RunGranted | RunEnding:
    """Decides which run a CreateJob request refers to if the job already exists: the newest run,
    which is resumed if necessary, or the next run, which is then started."""
    if event.follow and event.run is not None:
        return _follow(draft, event, event.run)
    asked, newest = event.run, draft.run.number
    if asked is not None and asked.began_unix_ms and not is_current(draft, asked):
        raise not_current(draft, asked, draft.now)
    number = newest if asked is None else asked.number
    if number == newest + 1:
        return _next(draft, event)
    if number != newest:
        raise not_current(draft, RunId(number=number), draft.now)
    if _goes_on(draft):
        _check_spec(draft, event.spec)
        return _granted(draft, begun=False)
    if event.resume:
        return _resume(draft, event)
    if asked is not None:
        raise _ended(draft, asked)
    return _next(draft, event)


def check_run(draft: Draft, event: OfRun) -> None:
    """Raises PreconditionError if the process that sent the event belongs to a run other than the
    newest. Raises UnavailableError for a parameter server whose run may become the newest again.

    If Redis has lost a run and one of its members returns, that run becomes the newest again,
    provided that no member has trained in a later run. Until then, a server of the lost run waits
    for the members of its run to return. If no run is in progress, it waits for the run that is
    started next.
    """
    run, reported = event.run, event.event
    if is_current(draft, run):
        return
    if _may_come_back(draft, run):
        if isinstance(reported, MemberJoined) and _has_worked_in_it(draft, reported):
            _bring_back(draft, run)
            return
        if isinstance(reported, ServerRegistered):
            reason = Refusal.RUN_UNKNOWN if _goes_on(draft) else Refusal.RUN_ENDED
            raise UnavailableError(str(not_current(draft, run, draft.now)), reason=reason)
    raise not_current(draft, run, draft.now)


# ----------------------------------------------------------------------- starting and resuming runs


def _next(draft: Draft, event: RunWanted) -> RunGranted | RunEnding:
    """Starts the run after the newest one."""
    if _goes_on(draft):
        if draft.members:
            raise PreconditionError(
                f"run {draft.run} of job {draft.spec.job_id} is still in progress with "
                f"{len(draft.members)} members ({_members(draft)}); stop it before starting run "
                f"{draft.run.number + 1}, or omit --run to join it",
                reason=Refusal.RUN_UNDER_WAY,
            )
        draft.ending, draft.ended_unix_ms = JobEnding.STOPPED, draft.now.unix_ms
        draft.stop_reason = f"it had no members left when run {draft.run.number + 1} was requested"
    elif draft.members:
        return _ending(draft)
    # Redis's clock may have been set back, but the launchers' auxiliary job needs a later start
    # time to recognize the newer run.
    began_unix_ms = max(draft.now.unix_ms, draft.ended_unix_ms, draft.run.began_unix_ms + 1)
    _begin(draft, event.spec, RunId(number=draft.run.number + 1, began_unix_ms=began_unix_ms))
    return _granted(draft, begun=True)


def _resume(draft: Draft, event: RunWanted) -> RunGranted | RunEnding:
    """Resumes the newest run after it has ended. A completed run cannot be resumed."""
    if draft.ending is JobEnding.COMPLETED:
        raise PreconditionError(
            f"run {draft.run} of job {draft.spec.job_id} has completed ({draft.stop_reason}), so "
            "there is nothing to resume; start without --resume to begin run "
            f"{draft.run.number + 1}",
            reason=Refusal.RUN_COMPLETED,
        )
    if draft.members:
        return _ending(draft)
    before, after = draft.spec, event.spec
    if (before.parameter_servers, before.parameter_server_backups) != (
        after.parameter_servers,
        after.parameter_server_backups,
    ):
        _check_spec(
            draft,
            replace(
                before,
                parameter_servers=after.parameter_servers,
                parameter_server_backups=after.parameter_server_backups,
            ),
        )
    _reopen(draft, after)
    return _granted(draft, begun=True)


def _follow(draft: Draft, event: RunWanted, run: RunId) -> RunGranted | RunEnding:
    """Makes the launchers' auxiliary job follow the run `run` of the main job."""
    if is_current(draft, run):
        if _goes_on(draft):
            _check_spec(draft, event.spec)
            return _granted(draft, begun=False)
        if draft.members:
            return _ending(draft)
        _reopen(draft, event.spec)
        return _granted(draft, begun=True)
    if run.began_unix_ms <= draft.run.began_unix_ms:
        raise not_current(draft, run, draft.now)
    ended = f"run {run} of its job began"
    if draft.phase is not JobPhase.FINISHED:
        draft.ending, draft.stop_reason, draft.ended_unix_ms = (
            draft.ending or JobEnding.STOPPED,
            draft.stop_reason or ended,
            draft.now.unix_ms,
        )
    _begin(draft, event.spec, run)
    return _granted(draft, begun=True)


def _may_come_back(draft: Draft, run: RunId) -> bool:
    """Returns whether `run` can become the newest run again. This is the case if Redis may have
    lost the run and no member is known to have trained in a later one."""
    known_ends = [past.ended_unix_ms for past in draft.past_runs]
    if not _goes_on(draft):
        known_ends.append(draft.ended_unix_ms)
    unused = draft.is_fresh or (not _goes_on(draft) and not draft.members)
    return (
        unused
        and find_past(draft, run) is None
        and run.number >= draft.run.number
        and run.began_unix_ms >= max(known_ends, default=0)
    )


def _has_worked_in_it(draft: Draft, event: MemberJoined) -> bool:
    """Returns whether the event comes from a member that has worked in a run lost by Redis, so that
    this run becomes the newest again. Returns False for a member that will be refused."""
    lost = event.last_generation - draft.number
    known = _goes_on(draft) and (
        event.identity.member_id in draft.members or event.identity.member_id in draft.departed
    )
    return 0 < lost <= draft.policy.most_lost_generations and not known


def _bring_back(draft: Draft, run: RunId) -> None:
    if _goes_on(draft):
        draft.run_aliases = (*draft.run_aliases, draft.run)
        draft.run = run
    else:
        _begin(draft, draft.spec, run)
    draft.reasons.append(
        f"Redis lost run {run}, but some of its members are connected; the run continues"
    )


def _goes_on(draft: Draft) -> bool:
    return draft.phase not in (JobPhase.STOPPING, JobPhase.FINISHED)


def _begin(draft: Draft, spec: JobSpec, run: RunId) -> None:
    """Starts a run. Closes the sessions of members and servers that are still connected, since they
    belong to the previous run."""
    before, members, servers = (
        draft.run,
        list(draft.members),
        [server.server_id for server in draft.servers.values() if server.alive],
    )
    draft.begin_run(spec, run)
    error = not_current(draft, before, draft.now)
    draft.effects += [EndSession(member_id=member_id, error=error) for member_id in members]
    draft.effects += [EndServerSession(server_id=server_id, error=error) for server_id in servers]
    draft.records.append(Record(kind="run_began", generation=draft.number))
    draft.reasons.append(f"run {run} began")


def _reopen(draft: Draft, spec: JobSpec) -> None:
    """Reopens a run that has ended, with its generations, servers and leases."""
    draft.spec, draft.phase, draft.departing = spec, JobPhase.WAITING, False
    draft.ending, draft.stop_reason, draft.ended_unix_ms = JobEnding.NONE, "", 0
    draft.records.append(Record(kind="run_resumed", generation=draft.number))
    draft.reasons.append(f"run {draft.run} resumed")


def _ending(draft: Draft) -> RunEnding:
    """Returns the outcome of a RunWanted event while a run that has ended still has members. Evicts
    members that have been silent for longer than a lease."""
    why = (
        f"run {draft.run} of job {draft.spec.job_id} {_ENDED[draft.ending]} ({draft.stop_reason}), "
        f"but {len(draft.members)} of its members have not left yet ({_members(draft)})"
    )
    for member in list(draft.members.values()):
        pulse = draft.pulse(member.member_id)
        if pulse is not None and pulse.silent_ms(draft.now.ms) > draft.spec.lease_ms:
            detail = (
                f"no heartbeat for {pulse.silent_ms(draft.now.ms)} ms, and the next run is waiting "
                "for it"
            )
            member_lost(
                draft,
                MemberLost(member_id=member.member_id, ending=Ending.LEASE_EXPIRED, detail=detail),
            )
    return RunEnding(why=why)


# ------------------------------------------------------------------------------ membership of a run


def same_run(one: RunId, other: RunId) -> bool:
    """Returns whether two ids refer to the same run. A start time of 0 means unknown, and matches
    any start time."""
    known = one.began_unix_ms == other.began_unix_ms or 0 in (
        one.began_unix_ms,
        other.began_unix_ms,
    )
    return one.number == other.number and known


def is_current(job: Runs, run: RunId) -> bool:
    """Returns whether `run` is the newest run or one of its aliases (JobState.run_aliases)."""
    return any(same_run(run, each) for each in (job.run, *job.run_aliases))


def find_past(job: Runs, run: RunId) -> PastRun | None:
    """Returns the record of a past run; None if `run` is the newest run or is not on record."""
    if is_current(job, run):
        return None
    return next((past for past in job.past_runs if same_run(past.run, run)), None)


def not_current(job: Runs, run: RunId, now: Now) -> PreconditionError:
    """Returns the error for a caller that belongs to a run other than the newest. It explains what
    happened to that run."""
    newest = f"the newest one is run {job.run}"
    past = find_past(job, run)
    if past is not None:
        how = f"{_ENDED[past.ending]} {max(0, now.unix_ms - past.ended_unix_ms) // 1000} s ago"
        why = f" ({past.reason})" if past.reason else ""
        return PreconditionError(
            f"run {run} of job {job.spec.job_id} {how}{why}; {newest}", reason=Refusal.RUN_ENDED
        )
    if run.number < job.run.number:
        return PreconditionError(
            f"run {run} of job {job.spec.job_id} has ended, but its outcome is no longer "
            f"recorded; {newest}",
            reason=Refusal.RUN_ENDED,
        )
    return PreconditionError(
        f"job {job.spec.job_id} has no run "
        f"{run}{' that began then' if run.began_unix_ms else ''}: {newest}, and the next will be "
        f"run {job.run.number + 1}. If this run existed, the coordinator's Redis lost it",
        reason=Refusal.RUN_UNKNOWN,
    )


def _granted(draft: Draft, *, begun: bool) -> RunGranted:
    return RunGranted(
        run=draft.run, begun=begun, previous=draft.past_runs[-1] if draft.past_runs else None
    )


def _ended(draft: Draft, run: RunId) -> PreconditionError:
    """Returns the error for a caller that wants to take part in the newest run after it has
    ended."""
    return PreconditionError(
        f"run {run} of job {draft.spec.job_id} {_ENDED[draft.ending]} ({draft.stop_reason}), and "
        "no newer run has begun",
        reason=Refusal.RUN_ENDED,
    )


def _check_spec(draft: Draft, spec: JobSpec) -> None:
    there = draft.spec
    if there == spec:
        return
    names = [
        name for name in JobSpec.__dataclass_fields__ if getattr(there, name) != getattr(spec, name)
    ]
    differs = ", ".join(
        f"{name} is {getattr(there, name)}, not {getattr(spec, name)}" for name in names
    )
    raise PreconditionError(
        f"run {draft.run} of job {there.job_id} is in progress with a different specification: "
        f"{differs}; use the same specification or another job id. If no members are left, --run "
        f"{draft.run.number + 1} begins a new run",
        reason=Refusal.JOB_CONFLICT,
    )


def _members(draft: Draft) -> str:
    """Returns a human-readable list of the members' hosts."""
    hosts = sorted({member.identity.host for member in draft.members.values()})
    return ", ".join(hosts[:_MOST_NAMED]) + (", ..." if len(hosts) > _MOST_NAMED else "")
