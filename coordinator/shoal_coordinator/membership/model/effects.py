"""Outputs of the core: actions that the shell carries out once the new state has been written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal_common.errors import ShoalError

from shoal_coordinator.membership.model.state import Generation, Move, ServerRole


@dataclass(frozen=True, kw_only=True)
class AnnounceGeneration:
    """Sends the generation to all its members that have a session."""

    generation: Generation


@dataclass(frozen=True, kw_only=True)
class SendGeneration:
    """Sends the newest generation to a member that has reconnected and has not received it."""

    member_id: str
    generation: Generation


@dataclass(frozen=True, kw_only=True)
class SendStandby:
    """Notifies a member that it currently has no rank, and why."""

    member_id: str
    reason: str
    apart_from: str = ""
    """Value of Member.apart_from: id of the member that this member cannot reach; empty if there is
    none."""


@dataclass(frozen=True, kw_only=True)
class SilentMember:
    """A member that has stopped sending heartbeats. Another member on its machine, `read_by`, reads
    its stack traces."""

    member_id: str
    pid: int
    read_by: str
    logs: bool
    """True if `read_by` also logs notices on behalf of this member, which is the first on its
    machine."""


@dataclass(frozen=True, kw_only=True)
class SendNotice:
    """Tells the members of a generation what training is waiting for. An empty text means that the
    wait has ended."""

    generation: Generation
    text: str
    silent: Sequence[SilentMember] = ()


@dataclass(frozen=True, kw_only=True)
class SendDrain:
    """Tells a member to leave at its next step boundary."""

    member_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SendStop:
    """Tells a member to leave because the job is stopping or the member was asked to drain."""

    member_id: str
    reason: str
    now: bool
    """True if the member must leave immediately, since it will not reach another step boundary and
    no generation follows. False if it leaves at the next step boundary, even after a failure."""
    behind: bool = False
    """True if the newest generation excludes this member, which worked in an earlier one. Its state
    is then outdated."""
    finished_steps: int | None = None
    """Number of steps committed by a member whose script has finished; None if no script has
    finished, or the number is unknown."""


@dataclass(frozen=True, kw_only=True)
class EndSession:
    """Closes a member's stream: without an error if the member has left, otherwise with an error
    that explains why it was evicted."""

    member_id: str
    error: ShoalError | None


@dataclass(frozen=True, kw_only=True)
class EndServerSession:
    """Closes a server's stream with an error."""

    server_id: str
    error: ShoalError


@dataclass(frozen=True, kw_only=True)
class SendMembers:
    """Tells parameter servers which members are training. Sent to all servers, or only to a server
    that has just registered."""

    generation: int
    member_ids: tuple[str, ...]
    key_digests: tuple[str, ...]
    """`Identity.key_digest` of each member."""
    server_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class SendPlace:
    """Tells a parameter server its place (which share of the tensors it has), its role there
    (primary or backup), and the other server of this place (shoal.v1.ServerPlace)."""

    server_id: str
    epoch: int
    role: ServerRole
    primary_address: str
    backup_id: str
    in_sync: bool


@dataclass(frozen=True, kw_only=True)
class SendSettled:
    """Tells a primary that the outcome of all moves of partitions up to number `move` is decided
    (shoal.v1.MovesSettled)."""

    server_id: str
    move: int
    epoch: int
    """Epoch of the shard map."""


@dataclass(frozen=True, kw_only=True)
class SendMove:
    """Tells the primary of the place `move.giver` to hand partitions over to another server
    (shoal.v1.MovePartitions)."""

    server_id: str
    move: Move
    receiver_address: str
    """Address of the receiver; empty if it is absent or does not accept calls yet."""


@dataclass(frozen=True, kw_only=True)
class StopServer:
    """Tells one server to exit because it has been drained."""

    server_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class StopServers:
    """Tells all servers to exit because the job has ended and no members are left."""

    reason: str


Effect = (
    AnnounceGeneration
    | SendGeneration
    | SendStandby
    | SendNotice
    | SendDrain
    | SendStop
    | EndSession
    | EndServerSession
    | SendMembers
    | SendPlace
    | SendSettled
    | SendMove
    | StopServer
    | StopServers
)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One entry of the job's event log, written together with the state."""

    kind: str
    """One of job_created, run_began, run_resumed, member_joined, member_ready, member_lost,
    member_left, member_exited, member_quarantined, machine_leaving, machine_unhealthy,
    machine_excluded, machine_readmitted, drain_requested, generation_formed, collective_failed,
    job_on_hold, step_stands, straggler_found, generations_lost, stop_requested, job_failed,
    job_finished, server_registered, server_lost, server_promoted, backup_in_sync, backup_dropped,
    tensors_declared, partitions_moved, move_failed, server_draining and server_drained."""
    generation: int = 0
    member_id: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    run: int = 0
    """Number of the job's run, filled in by the draft."""
