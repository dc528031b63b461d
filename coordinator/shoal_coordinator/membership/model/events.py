"""Inputs of the core: one frozen dataclass per kind of event, parsed and validated by the shell."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from shoal_coordinator.membership.model.replicas import Replicas
from shoal_coordinator.membership.model.shards import TensorSpec
from shoal_coordinator.membership.model.spec import JobSpec
from shoal_coordinator.membership.model.state import (
    Identity,
    JobEnding,
    MachineCondition,
    RunId,
)


class LeaveReason(enum.StrEnum):
    """Reason why a member leaves: a value of shoal.v1.Leave.Reason."""

    DRAINED = "drained"
    FINISHED = "finished"
    FAILED = "failed"


class Ending(enum.StrEnum):
    """Reason for which the coordinator considers a process to have ended."""

    STREAM_BROKEN = "stream_broken"
    LEASE_EXPIRED = "lease_expired"
    PROCESS_EXITED = "process_exited"
    SCRIPT_FAILED = "script_failed"
    STALLED = "stalled"


@dataclass(frozen=True, kw_only=True)
class MemberJoined:
    """A process has opened a session, for the first time or again after its stream broke."""

    identity: Identity
    last_generation: int
    last_world_size: int = 0
    """Number of ranks in generation `last_generation`; 0 if unknown."""
    works_in: int = 0
    """Generation that the member works in; 0 if it has not worked in any."""


@dataclass(frozen=True, kw_only=True)
class MemberReady:
    """A member asks for a rank."""

    member_id: str


@dataclass(frozen=True, kw_only=True)
class MemberLost:
    """A process has ended without leaving the job."""

    member_id: str
    ending: Ending
    detail: str


@dataclass(frozen=True, kw_only=True)
class LeaseEnded:
    """A member has not sent a heartbeat for the duration of its lease. The event is repeated while
    the member stays silent."""

    member_id: str


@dataclass(frozen=True, kw_only=True)
class StreamBroken:
    """A member's stream closed although the member had not left. Either its process has died, or
    the network between it and the coordinator has failed."""

    member_id: str


@dataclass(frozen=True, kw_only=True)
class MemberLeft:
    """A member has left the job and given its reason."""

    member_id: str
    reason: LeaveReason
    detail: str
    alone: bool = False
    """True if the other members of its generation continue without it, even if the job is
    stopping."""
    steps: int | None = None
    """Number of steps that the member has committed; None if unknown."""
    replicas: Replicas | None = None
    """Digests of the member's state; None if no other member has the same state, or the member does
    not report digests."""


@dataclass(frozen=True, kw_only=True)
class ExitReported:
    """A launcher has observed that a process has exited."""

    member_id: str
    exit_code: int
    signal: int
    failure: str = ""
    """Error with which the job must fail; empty if it need not fail."""
    finished: bool = False
    """True if the process had reported to its launcher that its script finished."""


@dataclass(frozen=True, kw_only=True)
class CollectiveFailed:
    """A member reports that a collective failed."""

    member_id: str
    generation: int
    suspects: tuple[int, ...]
    """Ranks that the member suspects to have failed."""
    timed_out: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class MachineReported:
    """A launcher or a user reports the condition of a machine."""

    host: str
    condition: MachineCondition
    """The new condition; never EXCLUDED, which only the coordinator sets."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class DrainRequested:
    """A user asks a member to leave. Exactly one of `member_id` and `rank` is set."""

    member_id: str | None
    rank: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class StopRequested:
    """A user asks all members to leave."""

    reason: str
    ending: JobEnding = JobEnding.STOPPED
    """Outcome to record if the run never had a member, as with a plain script."""


@dataclass(frozen=True, kw_only=True)
class ServerRegistered:
    """A parameter server opened a session."""

    server_id: str
    address: str
    metrics_address: str
    host: str
    pid: int
    incarnation: str = ""
    generation: int = 0
    """Newest generation known to the server; 0 if there is none."""
    held_index: int | None = None
    """Place whose partitions the server has; None if it has no partitions."""


@dataclass(frozen=True, kw_only=True)
class ServerLost:
    """A parameter server's stream broke or its lease expired."""

    server_id: str
    ending: Ending


@dataclass(frozen=True, kw_only=True)
class BackupReported:
    """A primary reports the state of its backup (shoal.v1.BackupReport)."""

    server_id: str
    """Id of the reporting primary."""
    epoch: int
    in_sync: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class MoveReported:
    """A server reports the outcome of handing over partitions (shoal.v1.MoveReport)."""

    server_id: str
    """Id of the reporting server, the giver."""
    move: int
    taken: bool
    receiver_incarnation: str = ""
    reason: str = ""
    giver_failed: bool = False
    """True if the move failed because of the giver itself."""


@dataclass(frozen=True, kw_only=True)
class ServerDrainRequested:
    """A user asks a parameter server to hand over its partitions and exit."""

    server_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class TensorsDeclared:
    """A worker declares the tensors of its model."""

    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, kw_only=True)
class BatchesLeased:
    """A member acknowledges finished batches and asks for more."""

    member_id: str
    loader: str
    epoch: int
    batches_in_epoch: int
    want: int
    finished: tuple[int, ...]
    sequence: int
    """Number of the member's request for this loader and epoch; 0: not numbered."""
    keep: bool = False
    """True if the member keeps its leases even if `want` is 0. Otherwise, a request with `want=0`
    revokes all of them."""
    returned: tuple[int, ...] = ()
    """Batches that were leased to the member but not trained on, to be leased again."""
    batch_ms: int = 0
    """Time that the member needs per batch, in milliseconds; 0 if unknown."""


@dataclass(frozen=True, kw_only=True)
class RunWanted:
    """A caller asks to create a job that already exists (shoal.v1.CreateJobRequest)."""

    spec: JobSpec
    run: RunId | None = None
    resume: bool = False
    follow: bool = False


@dataclass(frozen=True, kw_only=True)
class OfRun:
    """An event sent by a process that belongs to a particular run of the job."""

    run: RunId
    event: (
        MemberJoined
        | ExitReported
        | MachineReported
        | DrainRequested
        | StopRequested
        | ServerRegistered
        | ServerDrainRequested
        | TensorsDeclared
        | BatchesLeased
    )


Event = (
    RunWanted
    | OfRun
    | MemberJoined
    | MemberReady
    | MemberLost
    | LeaseEnded
    | StreamBroken
    | MemberLeft
    | ExitReported
    | CollectiveFailed
    | MachineReported
    | DrainRequested
    | StopRequested
    | ServerRegistered
    | ServerLost
    | BackupReported
    | MoveReported
    | ServerDrainRequested
    | TensorsDeclared
    | BatchesLeased
)
