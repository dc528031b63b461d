"""Single entry point of the core: maps the state of a job and new events to the next state and the
actions that result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal_common.errors import ShoalError

from shoal_coordinator.membership.leases import Leased, batches_leased
from shoal_coordinator.membership.members.absence import leases_ended
from shoal_coordinator.membership.members.closed_streams import stream_broken, streams_due
from shoal_coordinator.membership.members.failures import collective_failed, incident_due
from shoal_coordinator.membership.members.generations import generation_due
from shoal_coordinator.membership.members.joining import Joined, member_joined, member_ready
from shoal_coordinator.membership.members.leaving import (
    DrainNoted,
    ExitNoted,
    drain_refused,
    drain_requested,
    exit_reported,
    last_one_left,
    member_left,
    member_lost,
    reached_again,
    stop_requested,
)
from shoal_coordinator.membership.members.machines import machine_reported
from shoal_coordinator.membership.members.readmission import continue_recovery, recovery_due
from shoal_coordinator.membership.members.stalls import stalls_due
from shoal_coordinator.membership.model.draft import Changes, Draft
from shoal_coordinator.membership.model.effects import Effect, Record
from shoal_coordinator.membership.model.events import (
    BackupReported,
    BatchesLeased,
    CollectiveFailed,
    DrainRequested,
    Event,
    ExitReported,
    LeaseEnded,
    MachineReported,
    MemberJoined,
    MemberLeft,
    MemberLost,
    MemberReady,
    MoveReported,
    OfRun,
    RunWanted,
    ServerDrainRequested,
    ServerLost,
    ServerRegistered,
    StopRequested,
    StreamBroken,
    TensorsDeclared,
)
from shoal_coordinator.membership.model.pulse import Pulses
from shoal_coordinator.membership.model.shards import ShardLayout
from shoal_coordinator.membership.model.spec import JobSpec, Policy
from shoal_coordinator.membership.model.state import JobState, MemberPhase, Now, RunId
from shoal_coordinator.membership.runs import RunEnding, RunGranted, check_run, run_wanted
from shoal_coordinator.membership.servers.moves import (
    move_reported,
    moves_due,
    server_drain_requested,
)
from shoal_coordinator.membership.servers.servers import (
    Registered,
    ServersAwaited,
    backup_reported,
    server_lost,
    server_registered,
    tensors_declared,
)

Granted = (
    RunGranted
    | RunEnding
    | Joined
    | ExitNoted
    | DrainNoted
    | Registered
    | ShardLayout
    | ServersAwaited
    | Leased
    | None
)
"""Response to a granted event; None if the event has no response."""

Outcome = Granted | ShoalError
"""Response to an event. A ShoalError means that the event was refused and changed nothing."""


@dataclass(frozen=True, kw_only=True)
class Transition:
    """Result of one call to `transition`."""

    state: JobState
    outcomes: tuple[Outcome, ...]
    """One outcome per event, in the order of the events."""
    effects: tuple[Effect, ...]
    """Actions to carry out, in this order, once the changes have been written."""
    records: tuple[Record, ...]
    """Entries for the event log."""
    changes: Changes
    reasons: tuple[str, ...]
    """Human-readable explanations of the decisions, for the log."""


def transition(
    state: JobState,
    now: Now,
    events: Sequence[Event],
    *,
    pulses: Pulses,
    nonce: str,
    policy: Policy | None = None,
) -> Transition:
    """Applies events to the state, in order, and then forms a generation if one is due.

    Also called without events, when a deadline has passed (`next_wake_ms`) or a member has started
    to work in a generation. Forms at most one generation, regardless of how many events require
    one. Never raises an error because of an event's contents.

    Args:
        state: state after the previous transition.
        now: current time.
        events: events since that transition.
        pulses: heartbeat states of members and servers.
        nonce: 32 hexadecimal digits, for the generation that may be formed.
        policy: constants used in the decisions.
    """
    draft = Draft(state, now=now, pulses=pulses, nonce=nonce, policy=policy or Policy())
    continue_recovery(draft)
    outcomes = tuple(_apply(draft, event) for event in events)
    leases_ended(draft, [event for event in events if isinstance(event, LeaseEnded)])
    streams_due(draft)
    incident_due(draft)
    reached_again(draft)
    drain_refused(draft)
    stalls_due(draft)
    recovery_due(draft)
    generation_due(draft)
    moves_due(draft)
    last_one_left(draft)
    after, changes = draft.freeze()
    return Transition(
        state=after,
        outcomes=outcomes,
        effects=tuple(draft.effects),
        records=tuple(draft.records),
        changes=changes,
        reasons=tuple(draft.reasons),
    )


def job_created(spec: JobSpec, run: RunId) -> JobState:
    """Returns the state of a new job. `run`: first run of the job or, if Redis has lost the job,
    the caller's run."""
    return JobState(spec=spec, run=run)


def next_wake_ms(state: JobState, now_ms: int, policy: Policy | None = None) -> int | None:
    """Returns the time (Now.ms) at which `transition` must be called even without events; None if
    there is no such time. Leases are checked separately (pulse.expired)."""
    policy = policy or Policy()
    wakes = (
        [max(state.broken_streams.values()) + policy.break_window_ms]
        if state.broken_streams
        else []
    )
    if state.look_at_moves_ms is not None:
        wakes.append(state.look_at_moves_ms)
    if not state.is_over:
        wakes += _generation_wakes(state, policy)
    return min((wake for wake in wakes if wake > now_ms), default=None)


def _generation_wakes(state: JobState, policy: Policy) -> list[int]:
    """Returns the times (Now.ms) at which a generation may become due."""
    wakes = [] if state.incident is None else [state.incident.due_ms]
    if state.recovery is not None and state.recovery.until_ms is not None:
        wakes.append(state.recovery.until_ms)
    if state.grace_until_ms is not None and state.in_phase(MemberPhase.READY):
        wakes.append(state.grace_until_ms)
    if state.formed_ms is not None and (
        state.in_phase(MemberPhase.READY) or state.in_phase(MemberPhase.DRAINING)
    ):
        wakes.append(state.formed_ms + policy.boundary_patience_ms)
    return wakes


def _apply(draft: Draft, event: Event) -> Outcome:
    try:
        return _handle(draft, event)
    except ShoalError as error:
        return error


def _handle(draft: Draft, event: Event) -> Granted:
    match event:
        case OfRun():
            check_run(draft, event)
            return _handle(draft, event.event)
        case RunWanted():
            return run_wanted(draft, event)
        case MemberJoined():
            return member_joined(draft, event)
        case MemberReady():
            member_ready(draft, event)
        case MemberLost():
            member_lost(draft, event)
        case LeaseEnded():
            pass  # decided after all events, since peers' reports count too
        case StreamBroken():
            stream_broken(draft, event)
        case MemberLeft():
            member_left(draft, event)
        case ExitReported():
            return exit_reported(draft, event)
        case CollectiveFailed():
            collective_failed(draft, event)
        case MachineReported():
            machine_reported(draft, event)
        case DrainRequested():
            return drain_requested(draft, event)
        case StopRequested():
            stop_requested(draft, event)
        case ServerRegistered():
            return server_registered(draft, event)
        case ServerLost():
            server_lost(draft, event)
        case BackupReported():
            backup_reported(draft, event)
        case MoveReported():
            move_reported(draft, event)
        case ServerDrainRequested():
            server_drain_requested(draft, event)
        case TensorsDeclared():
            return tensors_declared(draft, event)
        case BatchesLeased():
            return batches_leased(draft, event)
    return None
