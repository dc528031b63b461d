"""State of one job: frozen values, with their invariants documented on the fields.

All values are written to Redis (state/codec.py), except fields that are documented as "in memory
only", which are empty when the coordinator starts. Heartbeats do not change the state; pulse.py has
their contents.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from shoal_common.formats import rank_table

from shoal_coordinator.membership.model.batches import Loader
from shoal_coordinator.membership.model.replicas import ReplicasSeen
from shoal_coordinator.membership.model.shards import ShardLayout
from shoal_coordinator.membership.model.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class Now:
    """The two clocks that a decision may use."""

    ms: int
    """Milliseconds of a monotonic clock that does not advance while the coordinator is suspended.
    All waits and leases use this clock. Its origin is arbitrary."""
    unix_ms: int
    """Time of the Redis server, in Unix milliseconds. It is recorded for display and never
    compared."""


class JobPhase(enum.StrEnum):
    """Phase of a job: values of shoal.v1.JobPhase."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


class JobEnding(enum.StrEnum):
    """Outcome of a run: values of shoal.v1.JobEnding."""

    NONE = ""
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"


class MemberPhase(enum.StrEnum):
    """Phase of a member: values of shoal.v1.MemberPhase."""

    JOINED = "joined"
    READY = "ready"
    RANKED = "ranked"
    DRAINING = "draining"
    QUARANTINED = "quarantined"


class MachineCondition(enum.StrEnum):
    """Condition of a machine: values of shoal.v1.MachineCondition."""

    HEALTHY = "healthy"
    LEAVING = "leaving"
    UNHEALTHY = "unhealthy"
    EXCLUDED = "excluded"


class Cause(enum.StrEnum):
    """Cause of a generation: values of shoal.v1.Generation.Cause."""

    START = "start"
    FAILURE = "failure"
    BORDER = "border"


@dataclass(frozen=True, kw_only=True)
class RunId:
    """Identity of a run of a job."""

    number: int = 1
    """Number of the run within its job: 1, 2, 3, ..."""
    began_unix_ms: int = 0
    """Time at which the run began. It distinguishes the run from an earlier run with the same
    number, which can exist if Redis has lost the job. 0 if unknown, as for a job written by an
    older release."""

    def __str__(self) -> str:
        return str(self.number)


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A run that has ended, and its outcome."""

    run: RunId
    ended_unix_ms: int
    ending: JobEnding
    reason: str


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Identification and addresses of a process, as reported when it joins."""

    member_id: str
    host: str
    pid: int
    launcher_id: str
    local_index: int
    donor_address: str
    metrics_address: str
    donor_key: str = ""
    """Secret known to all members, which a peer must present to request this member's state."""
    key_digest: str = ""
    """Digest of the key that the member presents with each call. Empty: the member has no key, and
    any process with access to the job can act on its behalf."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One live worker process. A member is RANKED if and only if it has a rank in the newest
    generation and need not leave."""

    identity: Identity
    phase: MemberPhase
    joined_unix_ms: int
    replays: bool
    """True if the job already had a generation when the member joined. The member then replays its
    script before it becomes ready."""
    ready_order: int = 0
    """Position of the member's `ready` message among all `ready` messages of the job. The
    longest-waiting member gets a rank first. 0 until the member is ready."""
    holds_state: bool = False
    """True if the member has worked in a generation and therefore holds part of the training state.
    For a member of the newest generation, Rank.joining records this instead; this flag is set when
    the member loses its rank."""
    works_in: int = 0
    """Only while DRAINING: the generation that the member continues to work in after a generation
    without it has been written. 0: the member is in the newest generation, or in none."""
    reason: str = ""
    """Reason why the member is DRAINING or QUARANTINED."""
    apart_from: str = ""
    """Only while QUARANTINED: id of the member that this member cannot reach. Once it can reach
    that member, or that member has left, this member becomes READY again."""

    @property
    def member_id(self) -> str:
        return self.identity.member_id


@dataclass(frozen=True, kw_only=True)
class Machine:
    """An unhealthy machine."""

    condition: MachineCondition
    """Condition of the machine; never HEALTHY."""
    reason: str
    """Human-readable reason for the condition."""
    since_unix_ms: int

    @property
    def refuses(self) -> bool:
        """True if new members from this machine are refused."""
        return self.condition is not MachineCondition.LEAVING


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Record of a former member."""

    ending: str
    """Evidence that the process has ended (a value of events.Ending), or the member's reason for
    leaving (a value of events.LeaveReason)."""
    unix_ms: int
    rank: int = -1
    """The member's rank if it was in the newest generation when it left; otherwise -1."""
    steps: int | None = None
    """Number of steps that the member had committed; None if it did not report it."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank in a generation. Its number is its position in Generation.ranks."""

    member_id: str
    host: str
    local_rank: int
    """Rank within the host: 0 to local_world_size-1, in rank order."""
    local_world_size: int
    """Number of ranks on this host, which are adjacent."""
    donor_address: str
    joining: bool
    """True if the member is not known to have worked in any generation, and therefore holds no
    training state."""
    donor_key: str = ""

    @cached_property
    def line(self) -> str:
        """This entry of the rank table as a line of text, from which the table's digest is
        computed."""
        return rank_table.line(self.member_id, self.host, self.donor_address, self.donor_key)

    def is_same_place(self, other: Rank) -> bool:
        """Returns whether `other`, an entry of a different generation's table, describes the same
        member with the same addresses."""
        return self is other or self.line == other.line


@dataclass(frozen=True, kw_only=True)
class RankChange:
    """Difference between the ranks of a generation and of an older generation
    (shoal.v1.RankChange)."""

    since: int
    """Number of the older generation."""
    removed: tuple[int, ...]
    """Ranks of the older generation that were removed, ascending."""
    added: tuple[int, ...]
    """Ranks of the newer generation that were added, ascending. All other members keep their
    order."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One agreed list of members and their ranks. It is written to Redis before it is announced."""

    number: int
    """Number of the generation, at least 1 and higher than any earlier number in this job."""
    nonce: str
    """Random identifier: 32 hexadecimal digits."""
    cause: Cause
    ranks: tuple[Rank, ...]
    """Ranks of the generation: distinct members, with the ranks of one host adjacent. Their number
    lies between min_workers (min_survivors after the first generation) and max_workers."""
    interrupts_below: int
    """Members working in a generation below this number leave it immediately. The number never
    decreases, because a member may miss generations in between."""
    created_unix_ms: int
    change: RankChange | None = None
    """Difference from the ranks of the previous generation. None if there was no previous
    generation, or if the difference is too large to be worth sending."""
    written: tuple[int, ...] | None = ()
    """Generations, up to this one, that are stored as changes since the last full table. Empty:
    this generation is stored as a full table. None: the table is stored in an older format, so
    changes to it cannot be stored."""

    @cached_property
    def table_digest(self) -> bytes:
        """Digest that identifies the rank table."""
        return rank_table.digest(rank.line for rank in self.ranks)

    @cached_property
    def rank_of(self) -> Mapping[str, int]:
        """Member id -> rank."""
        return {rank.member_id: position for position, rank in enumerate(self.ranks)}


class ServerRole(enum.StrEnum):
    """Role of a parameter server: values of shoal.v1.ServerRole."""

    PRIMARY = "primary"
    BACKUP = "backup"


@dataclass(frozen=True, kw_only=True)
class Server:
    """One parameter server: the primary or the backup of a place, which is a share of the model's
    tensors."""

    server_id: str
    index: int
    """Place of the server (server_index), from 0. Drained places leave gaps. Each place has one
    primary and, if the job has backups, at most one backup."""
    address: str
    """Address of the server; empty until the server accepts calls."""
    metrics_address: str
    host: str
    pid: int
    alive: bool
    incarnation: str = ""
    """Identity of the process. It distinguishes the process from a later process of the same
    server, which in a container has the same host and pid."""
    role: ServerRole = ServerRole.PRIMARY
    epoch: int = 1
    """For a primary, the current epoch of its place (shoal.v1.ServerPlace.epoch); meaningless for a
    backup."""
    in_sync: bool = False
    """True if the primary acknowledges only changes that this backup has too. The backup then takes
    over if the primary is lost."""

    @property
    def serves(self) -> bool:
        """True if workers can send requests to the server."""
        return self.alive and self.role is ServerRole.PRIMARY and bool(self.address)


@dataclass(frozen=True, kw_only=True)
class Move:
    """Transfer of partitions from one server to another: shoal.v1.MovePartitions
    (docs/explanation/parameter-servers.md#moving-partitions)."""

    number: int
    partitions: tuple[int, ...]
    """Ids of the partitions, at least one, all owned by the giver."""
    giver: int
    """Index of the place that owns the partitions and hands them over."""
    giver_incarnation: str
    """Identity of the giver's process that hands over the partitions. If this process dies, data
    that it has sent may still arrive later. The next process must therefore retry the move under a
    different number, unless the partitions have already left."""
    receiver: int
    """Index of the place that receives the partitions and will own them."""

    def concerns(self, index: int) -> bool:
        """Returns whether the place with this index gives or receives partitions in this move."""
        return index in (self.giver, self.receiver)


@dataclass(frozen=True, kw_only=True)
class Drained:
    """Server process that has been drained. It may not have received the message to exit yet."""

    incarnation: str
    index: int
    """Index of the place that the server had; a different server may have it by now."""
    reason: str
    """Reason for draining, as sent to the process."""


@dataclass(frozen=True, kw_only=True)
class Moves:
    """The current move of partitions, and the server places that are draining or have been
    drained."""

    settled: int = 0
    """Number of the last move that has ended; 0 if there was none. It never decreases."""
    under_way: Move | None = None
    """The move in progress, of which there is at most one. Its number is `settled` + 1."""
    draining: Mapping[int, str] = field(default_factory=dict)
    """Index of a place that is giving away all its partitions -> human-readable reason. The entry
    is removed once all servers of the place have exited."""
    drained: Mapping[str, Drained] = field(default_factory=dict)
    """Server id -> its last drained process, in the order of draining, up to
    Policy.most_drained."""


@dataclass(frozen=True, kw_only=True)
class FailedServer:
    """The server process that is to blame for the last failed move of a place."""

    incarnation: str
    """Identity of the process to blame. Later processes in the same place are not excluded."""
    failures: int
    """Number of consecutive failed moves; at least one."""
    until_ms: int
    """End of the process's exclusion from moves."""


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """One member's report that a collective failed."""

    suspects: frozenset[str]
    timed_out: bool


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A failed collective that no death has explained yet."""

    generation: int
    opened_ms: int
    due_ms: int
    """Time at which to decide what to do about the failure."""
    reports: Mapping[str, FailureReport]
    """Member id -> its report; at least one."""


def populate(members: Mapping[str, Member]) -> Mapping[MemberPhase, int]:
    """Counts members by phase, for JobState.population."""
    return Counter(member.phase for member in members.values())


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Recovery of generations that Redis has lost. Their members continue in the newest one until
    all have returned."""

    FOUND: ClassVar[int] = -1
    """Value of `until_ms` for a recovery that was in progress when the coordinator was
    restarted."""

    known: int
    """Newest generation that Redis still has."""
    newest: int
    """Newest generation that any member has reported."""
    world_size: int
    """Number of ranks in the newest lost generation; 0 if unknown."""
    until_ms: int | None
    """Deadline for members to return; a generation is then written for the members that have
    returned. None: the generation has been written."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A stalled step and its latest explanation."""

    text: str
    reach: str
    """Part of the text that names members that cannot reach each other."""
    reported_ms: int
    located: int = 0
    """Number of members whose script line the text contains."""
    readers: Mapping[str, str] = field(default_factory=dict)
    """Silent member -> member on its machine that reads its stacks."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A member that slows the others down."""

    text: str
    found_ms: int
    seen_ms: int
    is_named: bool
    """True if the member has slowed the others down long enough to be named as a straggler."""


Pair = tuple[str, str]
"""Two member ids in ascending order."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """Complete state of one job."""

    spec: JobSpec
    run: RunId = RunId()
    """The newest run. All other fields except `run_above`, `past_runs` and `number` describe this
    run."""
    run_above: int = 0
    """Newest generation of all previous runs. Generations of this run have higher numbers."""
    run_aliases: tuple[RunId, ...] = ()
    """Runs whose members and servers are treated as members and servers of `run`. These runs began
    after Redis had lost `run` and before the members of `run` returned."""
    past_runs: tuple[PastRun, ...] = ()
    """The newest past runs, up to Policy.most_past_runs, oldest first."""
    phase: JobPhase = JobPhase.WAITING
    number: int = 0
    """Number of the newest generation; 0 before the first. It never decreases, even across runs."""
    generation: Generation | None = None
    """The newest generation. It may have ended because members are missing (phase WAITING)."""
    members: Mapping[str, Member] = field(default_factory=dict)
    """Live members; disjoint from `departed`."""
    departed: Mapping[str, Departure] = field(default_factory=dict)
    """Former members by id, in order of departure. Their ids are never used again."""
    servers: Mapping[str, Server] = field(default_factory=dict)
    layout: ShardLayout | None = None
    """Assignment of the declared tensors to servers. Once it is set, only the owners of partitions
    and its epoch change."""
    moves: Moves = field(default_factory=Moves)
    """State of the moves of partitions; empty until there is a layout."""
    loaders: Mapping[str, Loader] = field(default_factory=dict)
    last_order: int = 0
    """Highest Member.ready_order assigned so far."""
    accusations: Mapping[Pair, int] = field(default_factory=dict)
    """Number of times that two live members have accused each other of being unreachable, per
    pair."""
    machines: Mapping[str, Machine] = field(default_factory=dict)
    """Unhealthy machines, by host name (Identity.host)."""
    ending: JobEnding = JobEnding.NONE
    """NONE if and only if the phase is neither STOPPING nor FINISHED. FAILED is final."""
    stop_reason: str = ""
    """Reason why the job is stopping or has stopped, in phases STOPPING and FINISHED."""
    ended_unix_ms: int = 0
    """Time at which the run ended; 0 unless the phase is FINISHED."""
    departing: bool = False
    """True if a member with a rank has left at a step boundary that was the last for all members.
    No further generation is formed."""

    population: Mapping[MemberPhase, int] = field(default_factory=dict)
    """Number of `members` in each phase. Derived from `members` and not written; phases without
    members may be missing."""
    grace_until_ms: int | None = None
    """In memory only. End of the wait for further joiners; None if no member is waiting for a
    rank."""
    incident: Incident | None = None
    """In memory only, since members repeat their reports when they reconnect. None: no incident is
    open."""
    formed_ms: int | None = None
    """In memory only. Time at which the newest generation was written."""
    broken_streams: Mapping[str, int] = field(default_factory=dict)
    """In memory only. Members whose streams closed although they had not left: member id -> time
    (Now.ms). An entry is removed once a decision has been made about the member."""
    recovery: Recovery | None = None
    """In memory only. None: no recovery is in progress."""
    stall: Stall | None = None
    """In memory only. None: no step is stalled."""
    stragglers: Mapping[str, Straggler] = field(default_factory=dict)
    """In memory only. Straggler by member id."""
    kept_out_until_ms: Mapping[str, int] = field(default_factory=dict)
    """In memory only. QUARANTINED member -> earliest time for its return."""
    standby_text: str | None = None
    """In memory only. Last reason for the wait that was sent to the ready members; None if none was
    sent."""
    standby_sent_ms: int | None = None
    """In memory only. Time at which all ready members last received the reason for the wait."""
    looked_ms: int | None = None
    """In memory only. Time of the last check for stalled steps."""
    look_at_moves_ms: int | None = 0
    """In memory only. Time at which to check whether a move of partitions is due; None if nothing
    has changed since the last check."""
    failed_receivers: Mapping[int, FailedServer] = field(default_factory=dict)
    """In memory only. Index of a place -> server that is excluded as a receiver because its last
    move failed through no fault of the giver."""
    failed_givers: Mapping[int, FailedServer] = field(default_factory=dict)
    """In memory only. Index of a place -> server that is excluded as a giver because its last move
    failed through its own fault."""
    servers_awaited: int = 0
    """In memory only. Number of parameter servers that were missing when a worker last declared its
    tensors."""
    replicas: ReplicasSeen | None = None
    """In memory only. State digests of members that left after the last step; None if none has
    reported any."""
    deaths_ms: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """In memory only. Host name -> times (Now.ms) of its members' latest deaths, ascending."""
    fresh_failures: int = 0
    """In memory only. Number of consecutive generations that failed before they were
    Policy.fresh_generation_ms old."""

    def in_phase(self, phase: MemberPhase) -> int:
        """Returns the number of members in `phase`."""
        return self.population.get(phase, 0)

    @property
    def waits_for(self) -> str:
        """Human-readable description of what training is waiting for, and why; empty if it is not
        known to be waiting."""
        if self.stall is not None:
            return self.stall.text
        if (
            not self.servers_awaited
            or self.layout is not None
            or not self.members
            or self.phase is JobPhase.FINISHED
        ):
            return ""
        return (
            f"training cannot begin: {self.servers_awaited} of {self.spec.servers_to_lay_out} "
            "parameter servers have not registered; start each with `shoal-ps-server --job "
            f"{self.spec.job_id} --coordinator HOST:PORT`, or all with `docker compose --profile "
            "servers up`"
        )

    @property
    def is_deserted(self) -> bool:
        """True if the job has neither members nor live servers."""
        return not self.members and not any(server.alive for server in self.servers.values())

    @property
    def is_over(self) -> bool:
        """True if no further generation will be formed."""
        return self.phase is JobPhase.FINISHED or (
            self.phase is JobPhase.STOPPING and self.departing
        )
