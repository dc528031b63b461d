"""Inputs of the core: one frozen value per kind of event, parsed and validated by the shell."""

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
    """Reason for which a member leaves: values of shoal.v1.Leave.Reason."""

    DRAINED = "drained"
    FINISHED = "finished"
    FAILED = "failed"


class Ending(enum.StrEnum):
    """Evidence by which the coordinator learned that a process is gone."""

    STREAM_BROKEN = "stream_broken"
    LEASE_EXPIRED = "lease_expired"
    PROCESS_EXITED = "process_exited"
    SCRIPT_FAILED = "script_failed"
    STALLED = "stalled"


@dataclass(frozen=True, kw_only=True)
class MemberJoined:
    """A process opened a session, for the first time or after its stream broke."""

    identity: Identity
    last_generation: int
    last_world_size: int = 0
    works_in: int = 0
    """Number of ranks in the generation `last_generation`; 0 if unknown."""


@dataclass(frozen=True, kw_only=True)
class MemberReady:
    """A member requests a rank."""

    member_id: str


@dataclass(frozen=True, kw_only=True)
class MemberLost:
    """A process is gone without having left."""

    member_id: str
    ending: Ending
    detail: str


@dataclass(frozen=True, kw_only=True)
class LeaseEnded:
    """A member has sent no heartbeat for the duration of its lease. The event is repeated for as
    long as the member stays silent."""

    member_id: str


@dataclass(frozen=True, kw_only=True)
class StreamBroken:
    """A member's stream ended before the member left. Its process has died, or the network between
    it and the coordinator has failed."""

    member_id: str


@dataclass(frozen=True, kw_only=True)
class MemberLeft:
    """A member has left the job and stated its reason."""

    member_id: str
    reason: LeaveReason
    detail: str
    alone: bool = False
    """True if the other members of its generation continue without it, even in a job that stops."""
    steps: int | None = None
    """Optimizer steps that the member has committed; None if they are unknown."""
    replicas: Replicas | None = None
    """State digests of the member; None if it shares no state with others, or does not report the
    digests."""


@dataclass(frozen=True, kw_only=True)
class ExitReported:
    """A launcher saw a process end."""

    member_id: str
    exit_code: int
    signal: int
    failure: str = ""
    """Message with which the job fails; empty: the job does not fail."""
    finished: bool = False
    """The process had reported to its launcher that its script finished."""


@dataclass(frozen=True, kw_only=True)
class CollectiveFailed:
    """A member reports that a collective failed."""

    member_id: str
    generation: int
    suspects: tuple[int, ...]
    """Ranks suspected of having failed."""
    timed_out: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class MachineReported:
    """A launcher or a user reports the condition of a machine."""

    host: str
    condition: MachineCondition
    """New condition; never EXCLUDED."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class DrainRequested:
    """A user asks a member to leave. Exactly one of `member_id` and `rank` is given."""

    member_id: str | None
    rank: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class StopRequested:
    """A user asks all members to leave."""

    reason: str
    ending: JobEnding = JobEnding.STOPPED
    """Outcome to record for a run that never had a member, i.e. of a plain script."""


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
    """Place whose partitions the server holds; None if it holds none."""


@dataclass(frozen=True, kw_only=True)
class ServerLost:
    """A parameter server's stream broke or its lease ended."""

    server_id: str
    ending: Ending


@dataclass(frozen=True, kw_only=True)
class BackupReported:
    """A primary reports the state of its backup: shoal.v1.BackupReport."""

    server_id: str
    """Id of the reporting primary."""
    epoch: int
    in_sync: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class MoveReported:
    """A giver reports the outcome of moving its partitions: shoal.v1.MoveReport."""

    server_id: str
    """Id of the reporting giver."""
    move: int
    taken: bool
    receiver_incarnation: str = ""
    reason: str = ""
    giver_failed: bool = False
    """True if the giver is to blame for the failed move."""


@dataclass(frozen=True, kw_only=True)
class ServerDrainRequested:
    """A user asks to drain a parameter server's place."""

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
    """True if the member keeps its leases although `want` is 0; otherwise such a request returns
    all of them to the pool."""
    returned: tuple[int, ...] = ()
    """Batches leased to the member that it has not trained on; they are dealt again."""
    batch_ms: int = 0
    """The member's time per batch; 0 if unknown."""


@dataclass(frozen=True, kw_only=True)
class RunWanted:
    """A caller creates a job that already exists: shoal.v1.CreateJobRequest."""

    spec: JobSpec
    run: RunId | None = None
    resume: bool = False
    follow: bool = False


@dataclass(frozen=True, kw_only=True)
class OfRun:
    """An event caused by a participant of a particular run."""

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
