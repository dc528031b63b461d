"""What can happen to a job: the inputs of the core, one frozen value per kind. Parsed and checked
before they get here."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from shoal_coordinator.membership.replicas import Replicas
from shoal_coordinator.membership.shards import TensorSpec
from shoal_coordinator.membership.spec import JobSpec
from shoal_coordinator.membership.state import Identity, JobEnding, RunId


class LeaveReason(enum.StrEnum):
    """Values of shoal.v1.Leave.Reason, which describes them."""

    DRAINED = "drained"
    FINISHED = "finished"
    FAILED = "failed"


class Ending(enum.StrEnum):
    """How the coordinator came to know that a process is gone."""

    STREAM_BROKEN = "stream_broken"
    LEASE_EXPIRED = "lease_expired"
    PROCESS_EXITED = "process_exited"
    SCRIPT_FAILED = "script_failed"
    STALLED = "stalled"


@dataclass(frozen=True, kw_only=True)
class MemberJoined:
    """A process opened a session: new, or again after its stream broke."""

    identity: Identity
    last_generation: int
    last_world_size: int = 0
    works_in: int = 0
    """Ranks of that generation; 0: not known."""


@dataclass(frozen=True, kw_only=True)
class MemberReady:
    """A member wants a rank."""

    member_id: str


@dataclass(frozen=True, kw_only=True)
class MemberLost:
    """A process is gone without saying so."""

    member_id: str
    ending: Ending
    detail: str


@dataclass(frozen=True, kw_only=True)
class LeaseEnded:
    """A member has not been heard of for its lease, and still has not. Said again and again."""

    member_id: str


@dataclass(frozen=True, kw_only=True)
class StreamBroken:
    """A member's stream ended without a goodbye: its process is gone, or the network between."""

    member_id: str


@dataclass(frozen=True, kw_only=True)
class MemberLeft:
    """A member said goodbye."""

    member_id: str
    reason: LeaveReason
    detail: str
    alone: bool = False
    """The others of its generation go on without it, in a job that stops as well."""
    steps: int = 0
    """Optimizer steps that it has committed."""
    replicas: Replicas | None = None
    """None: it holds nothing that others hold, or does not say."""


@dataclass(frozen=True, kw_only=True)
class ExitReported:
    """A launcher saw a process end."""

    member_id: str
    exit_code: int
    signal: int
    failure: str = ""
    """Not empty: the job fails with it."""
    finished: bool = False
    """The process had told its launcher that its script came to its end."""


@dataclass(frozen=True, kw_only=True)
class CollectiveFailed:
    """A collective failed at a member."""

    member_id: str
    generation: int
    suspects: tuple[int, ...]
    """Ranks."""
    timed_out: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class DrainRequested:
    """Someone asks that a member leaves; exactly one of member_id and rank is given."""

    member_id: str | None
    rank: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class StopRequested:
    """Someone asks that all members leave."""

    reason: str
    ending: JobEnding = JobEnding.STOPPED
    """What a run comes to that never had a member: a plain script's."""


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
    """The newest that it knows; 0: none."""
    held_index: int | None = None
    """The place whose partitions it holds; None: it holds none."""


@dataclass(frozen=True, kw_only=True)
class ServerLost:
    """A parameter server's stream broke or its lease ended."""

    server_id: str
    ending: Ending


@dataclass(frozen=True, kw_only=True)
class BackupReported:
    """A primary says how it is with its backup: shoal.v1.BackupReport."""

    server_id: str
    """The primary's."""
    epoch: int
    in_sync: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class MoveReported:
    """A server says what became of a move of its partitions: shoal.v1.MoveReport."""

    server_id: str
    """The giver's."""
    move: int
    taken: bool
    receiver_incarnation: str = ""
    reason: str = ""
    giver_failed: bool = False
    """It is the giver's fault that they were not taken."""


@dataclass(frozen=True, kw_only=True)
class ServerDrainRequested:
    """Someone asks that a parameter server's place is left."""

    server_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class TensorsDeclared:
    """A worker says what its model consists of."""

    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, kw_only=True)
class BatchesLeased:
    """A member acknowledges batches and asks for more."""

    member_id: str
    loader: str
    epoch: int
    batches_in_epoch: int
    want: int
    finished: tuple[int, ...]
    sequence: int
    """Numbers the member's requests for this loader and epoch; 0: not numbered."""
    keep: bool = False
    """The member goes on with what it has leased although `want` is 0; without it such a request
    gives all of that back."""
    returned: tuple[int, ...] = ()
    """Batches that were leased to the member and that it has not trained on: they are dealt
    again."""
    batch_ms: int = 0
    """How long the member takes for a batch; 0: not known."""


@dataclass(frozen=True, kw_only=True)
class RunWanted:
    """Someone creates the job, which is there already: shoal.v1.CreateJobRequest."""

    spec: JobSpec
    run: RunId | None = None
    resume: bool = False
    follow: bool = False


@dataclass(frozen=True, kw_only=True)
class OfRun:
    """Something that somebody does who belongs to a run."""

    run: RunId
    event: (
        MemberJoined
        | ExitReported
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
