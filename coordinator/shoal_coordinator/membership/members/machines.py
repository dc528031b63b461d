"""Rules about machines: excludes machines whose workers die repeatedly, and refuses new members on
machines that are excluded or reported as unhealthy.

A machine is identified by the host name that its members report. `Draft.machines` contains only
machines that are not healthy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median_high
from typing import TypeVar

from shoal_common.errors import LimitError, PreconditionError

from shoal_coordinator.membership.model.draft import Draft
from shoal_coordinator.membership.model.effects import Record
from shoal_coordinator.membership.model.events import Ending, MachineReported, MemberLost
from shoal_coordinator.membership.model.reasons import Refusal
from shoal_coordinator.membership.model.state import (
    JobPhase,
    Machine,
    MachineCondition,
    Member,
    MemberPhase,
)

T = TypeVar("T")

_GOES_ON = (JobPhase.WAITING, JobPhase.RUNNING)
_PRESENT = (MemberPhase.READY, MemberPhase.RANKED)


def machine_reported(draft: Draft, event: MachineReported) -> None:
    """Records the reported condition of a machine. A repeated report has no effect. An excluded
    machine stays excluded until it is reported as healthy."""
    known = draft.machines.get(event.host)
    if event.condition is MachineCondition.HEALTHY:
        draft.deaths_ms = _without(draft.deaths_ms, event.host)
        if known is not None:
            draft.machines = _without(draft.machines, event.host)
            _record(draft, "machine_readmitted", event.host, event.reason)
        return
    if known is not None and (
        known.condition in (event.condition, MachineCondition.EXCLUDED)
        or event.condition is MachineCondition.LEAVING
    ):
        return
    if known is None and len(draft.machines) >= draft.policy.most_machines:
        raise LimitError(
            f"job {draft.spec.job_id} already records {len(draft.machines)} machines that are not "
            "healthy, the maximum; readmit some with `shoal readmit HOST`",
            reason=Refusal.MACHINES_LIMIT,
        )
    _set(draft, event.host, event.condition, event.reason)
    member_gone(draft, event.host)


def check_machine(draft: Draft, host: str) -> None:
    """Raises PreconditionError if the job accepts no new members on this machine."""
    machine = draft.machines.get(host)
    if machine is not None and machine.refuses:
        raise PreconditionError(
            f"machine {host} is refused by job {draft.spec.job_id} ({machine.condition}): "
            f"{machine.reason}; repair it, then run `shoal readmit {host}`",
            reason=Refusal.MACHINE_REFUSED,
        )


def member_gone(draft: Draft, host: str) -> None:
    """Removes the record of a machine whose condition is LEAVING, once no member is left on it."""
    machine = draft.machines.get(host)
    if (
        machine is not None
        and machine.condition is MachineCondition.LEAVING
        and not _has_members(draft, host)
    ):
        draft.machines = _without(draft.machines, host)


def member_died(draft: Draft, member: Member, event: MemberLost) -> None:
    """Counts the death of a member against its machine. Excludes the machine if members keep dying
    there while members on other machines survive.

    A machine is excluded only if the job can continue without it. A death shortly after another one
    on the same machine is not counted, because it probably has the same cause.
    """
    host, policy = member.identity.host, draft.policy
    if draft.phase not in _GOES_ON or member.phase is MemberPhase.DRAINING:
        return
    pulse = draft.pulse(member.member_id)
    if event.ending is Ending.SCRIPT_FAILED and (pulse is None or not pulse.progress.sequence):
        # A launcher that restarts the workers of a plain script also leaves for this reason.
        return
    since_ms = draft.now.ms - policy.deaths_window_ms
    deaths = tuple(ms for ms in draft.deaths_ms.get(host, ()) if ms > since_ms)
    if deaths and draft.now.ms < deaths[-1] + policy.deaths_apart_ms:
        return
    deaths = (*deaths, draft.now.ms)
    recent = {other: times for other, times in draft.deaths_ms.items() if times[-1] > since_ms}
    draft.deaths_ms = {**recent, host: deaths}
    machine = draft.machines.get(host)
    if len(deaths) < policy.machine_deaths or (machine is not None and machine.refuses):
        return
    elsewhere = Counter(
        other.identity.host
        for other in draft.members.values()
        if other.identity.host != host and other.phase in _PRESENT
    )
    if elsewhere.total() < max(1, draft.spec.min_survivors):
        draft.reasons.append(f"machine {host} is not excluded: the job cannot continue without it")
        return
    typical = median_high(
        sum(ms > since_ms for ms in draft.deaths_ms.get(other, ())) for other in elsewhere
    )
    if len(deaths) < policy.machine_deaths + policy.deaths_ratio * typical:
        draft.reasons.append(
            f"machine {host} is not excluded: workers die on other machines as well"
        )
        return
    within_s = (draft.now.ms - deaths[0]) // 1000
    _set(
        draft,
        host,
        MachineCondition.EXCLUDED,
        f"its workers died {len(deaths)} times within {within_s} s (median of the other machines: "
        f"{typical}); last: {event.detail}",
    )


def _set(draft: Draft, host: str, condition: MachineCondition, reason: str) -> None:
    machine = Machine(condition=condition, reason=reason, since_unix_ms=draft.now.unix_ms)
    draft.machines = {**draft.machines, host: machine}
    _record(draft, f"machine_{condition}", host, reason)


def _has_members(draft: Draft, host: str) -> bool:
    return any(member.identity.host == host for member in draft.members.values())


def _record(draft: Draft, kind: str, host: str, reason: str) -> None:
    draft.records.append(
        Record(kind=kind, generation=draft.number, attributes={"host": host, "reason": reason})
    )


def _without(entries: Mapping[str, T], host: str) -> Mapping[str, T]:
    return {name: value for name, value in entries.items() if name != host}
