"""State of one job: frozen values with their invariants documented on the fields.

Everything here is written to Redis (state/codec.py), except for fields documented as in memory
only, which start empty when the coordinator starts. Heartbeats change nothing here; their contents
are in pulse.py.
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
    """Milliseconds of a monotonic clock that pauses while the coordinator is stopped; decides about
    waits and leases. Its origin is arbitrary."""
    unix_ms: int
    """Redis server time; recorded for people and clients, never compared."""


class JobPhase(enum.StrEnum):
    """Values of shoal.v1.JobPhase, documented there."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


class JobEnding(enum.StrEnum):
    """Values of shoal.v1.JobEnding, documented there."""

    NONE = ""
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"


class MemberPhase(enum.StrEnum):
    """Values of shoal.v1.MemberPhase, documented there."""

    JOINED = "joined"
    READY = "ready"
    RANKED = "ranked"
    DRAINING = "draining"
    QUARANTINED = "quarantined"


class Cause(enum.StrEnum):
    """Values of shoal.v1.Generation.Cause, documented there."""

    START = "start"
    FAILURE = "failure"
    BORDER = "border"


@dataclass(frozen=True, kw_only=True)
class RunId:
    """Identifies a run of a job."""

    number: int = 1
    """1, 2, 3, ... within a job."""
    began_unix_ms: int = 0
    """Distinguishes the run from one with the same number from before Redis lost the job. 0 if
    unknown, as for a job written by an older release."""

    def __str__(self) -> str:
        return str(self.number)


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A run that has ended."""

    run: RunId
    ended_unix_ms: int
    ending: JobEnding
    reason: str


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Description that a process gives of itself when it joins."""

    member_id: str
    host: str
    pid: int
    launcher_id: str
    local_index: int
    donor_address: str
    metrics_address: str
    donor_key: str = ""
    """Grants access to the member's state donor; a secret shared among members."""
    key_digest: str = ""
    """Digest of the key that the member presents with every call. Empty: it has none, so any other
    process of its job can impersonate it."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One live worker process. It is RANKED if and only if it has a rank in the newest generation
    and does not have to leave."""

    identity: Identity
    phase: MemberPhase
    joined_unix_ms: int
    replays: bool
    """True if the job already had a generation when this member joined: it replays its script
    before it is ready."""
    ready_order: int = 0
    """Increases from one `ready` to the next within a job: the longest-waiting member gets a rank
    first. 0 until it is ready."""
    holds_state: bool = False
    """True if it has worked in a generation and so holds part of the training state. For a member
    of the newest generation, Rank.joining records this instead; this flag is set when the member
    loses that place."""
    works_in: int = 0
    """Only while DRAINING: the generation in which it continues after one without it was written.
    0: it is in the newest one, or in none."""
    reason: str = ""
    """Reason why it is DRAINING or QUARANTINED."""
    apart_from: str = ""
    """Only while QUARANTINED: the member that it cannot work with. It becomes READY again once it
    reaches that member or that member is gone."""

    @property
    def member_id(self) -> str:
        return self.identity.member_id


@dataclass(frozen=True, kw_only=True)
class Departure:
    """A former member."""

    ending: str
    """Value of events.Ending or events.LeaveReason."""
    unix_ms: int
    rank: int = -1
    """Last rank if it was in the newest generation at that time; otherwise -1."""
    steps: int = 0
    """Optimizer steps that it had committed, as far as it reported."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One place in a generation; the rank's number is its position in Generation.ranks."""

    member_id: str
    host: str
    local_rank: int
    """0 .. local_world_size-1, in rank order."""
    local_world_size: int
    """Number of ranks on this host, which are adjacent."""
    donor_address: str
    joining: bool
    """True if the member is not known to have worked in any generation, so that it holds no
    state."""
    donor_key: str = ""

    @cached_property
    def line(self) -> str:
        """Part of the rank covered by the table's digest."""
        return rank_table.line(self.member_id, self.host, self.donor_address, self.donor_key)

    def is_same_place(self, other: Rank) -> bool:
        """Returns whether the table of another generation has the same entry."""
        return self is other or self.line == other.line


@dataclass(frozen=True, kw_only=True)
class RankChange:
    """Difference between the ranks of a generation and those of an older one:
    shoal.v1.RankChange."""

    since: int
    """Number of the older generation."""
    removed: tuple[int, ...]
    """Removed ranks of the older generation, ascending."""
    added: tuple[int, ...]
    """Added ranks of the newer generation, ascending. The others keep their order."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One agreed membership. Written to Redis before it is announced to anyone."""

    number: int
    """At least 1, and higher than any earlier number in this job."""
    nonce: str
    """32 hexadecimal digits."""
    cause: Cause
    ranks: tuple[Rank, ...]
    """min_workers (after the first generation, min_survivors) to max_workers ranks, with distinct
    members; the ranks of one host are adjacent."""
    interrupts_below: int
    """Members that work in a generation below this number leave it at once. Never decreases, since
    a member may miss generations in between."""
    created_unix_ms: int
    change: RankChange | None = None
    """Difference from the ranks of the previous generation; None if there was none, or if the
    difference is too large to be worth sending."""
    written: tuple[int, ...] | None = ()
    """Generations, including this one, that are stored as changes since the last full table. Empty:
    this generation's full table is stored. None: it is stored in a form that no change can follow.
    """

    @cached_property
    def table_digest(self) -> bytes:
        """Digest that identifies the rank table."""
        return rank_table.digest(rank.line for rank in self.ranks)

    @cached_property
    def rank_of(self) -> Mapping[str, int]:
        """Member id -> rank."""
        return {rank.member_id: position for position, rank in enumerate(self.ranks)}


class ServerRole(enum.StrEnum):
    """Values of shoal.v1.ServerRole, documented there."""

    PRIMARY = "primary"
    BACKUP = "backup"


@dataclass(frozen=True, kw_only=True)
class Server:
    """One parameter server: the primary of a place or its backup."""

    server_id: str
    index: int
    """Place of the server (server_index), >= 0. Places drained for good leave gaps. Each place has
    one primary and, if the job has backups, at most one backup."""
    address: str
    """Empty until it accepts calls."""
    metrics_address: str
    host: str
    pid: int
    alive: bool
    incarnation: str = ""
    """Distinguishes the process from a later one in its place, which has the same host and pid in a
    container."""
    role: ServerRole = ServerRole.PRIMARY
    epoch: int = 1
    """The shoal.v1.ServerPlace.epoch of a primary's place; meaningless for a backup."""
    in_sync: bool = False
    """For a live backup: the primary acknowledges nothing that the backup does not have, and the
    backup takes over if the primary is lost."""

    @property
    def serves(self) -> bool:
        """True if workers can use it."""
        return self.alive and self.role is ServerRole.PRIMARY and bool(self.address)


@dataclass(frozen=True, kw_only=True)
class Move:
    """Partitions that one server hands over to another: shoal.v1.MovePartitions
    (docs/explanation/parameter-servers.md#moving-partitions)."""

    number: int
    partitions: tuple[int, ...]
    """Partition ids; at least one, all owned by the giver."""
    giver: int
    """Index of the place that owns the partitions."""
    giver_incarnation: str
    """Process in that place that hands them over. If it dies, data already sent may still arrive
    late, so its successor must repeat the move under another number unless the partitions have
    already left."""
    receiver: int
    """Index of the place that will own the partitions."""

    def concerns(self, index: int) -> bool:
        """Returns whether a place is the giver or the receiver."""
        return index in (self.giver, self.receiver)


@dataclass(frozen=True, kw_only=True)
class Drained:
    """Process of a server whose place was drained. It may not have been told to exit yet."""

    incarnation: str
    index: int
    """Index of the drained place, which another server may occupy by now."""
    reason: str
    """Reason given to the process."""


@dataclass(frozen=True, kw_only=True)
class Moves:
    """The current move of partitions, and the drained and draining places."""

    settled: int = 0
    """Number of the newest settled move; 0 if there was none. Never decreases."""
    under_way: Move | None = None
    """The only move in progress; its number is `settled` + 1."""
    draining: Mapping[int, str] = field(default_factory=dict)
    """Index of a place that gives away everything -> why, for people. Removed once all servers of
    the place have ended."""
    drained: Mapping[str, Drained] = field(default_factory=dict)
    """Server id -> its last drained process, in the order of draining, up to
    Policy.most_drained."""


@dataclass(frozen=True, kw_only=True)
class FailedServer:
    """Process blamed for the last failed move to or from its place."""

    incarnation: str
    """Identifies the process; another process in its place has not failed."""
    failures: int
    """Number of consecutive failed moves; at least one."""
    until_ms: int
    """Earliest time at which it may take part in a move again."""


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """Report of one member on a failed collective."""

    suspects: frozenset[str]
    timed_out: bool


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A failed collective without an explanation so far."""

    generation: int
    opened_ms: int
    due_ms: int
    """Time at which to decide about it."""
    reports: Mapping[str, FailureReport]
    """Member id -> its report; at least one."""


def populate(members: Mapping[str, Member]) -> Mapping[MemberPhase, int]:
    """Returns JobState.population of these members."""
    return Counter(member.phase for member in members.values())


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Members know of generations lost by Redis; they continue in the newest of them until all are
    back."""

    FOUND: ClassVar[int] = -1
    """`until_ms` of a recovery that was under way when the coordinator was restarted."""

    known: int
    """Newest generation that Redis had kept."""
    newest: int
    """Newest generation known to a member."""
    world_size: int
    """Number of ranks; 0 if unknown."""
    until_ms: int | None
    """Latest time at which a generation is written with the members that have returned. None: it
    was written."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A stalled step with its latest explanation."""

    text: str
    reach: str
    """Part of the text that names the members that cannot reach each other."""
    reported_ms: int


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A member that slows the others down."""

    text: str
    found_ms: int
    seen_ms: int
    is_named: bool
    """True if it has slowed them down for long enough to be named."""


Pair = tuple[str, str]
"""Two member ids in ascending order."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """Complete state of one job."""

    spec: JobSpec
    run: RunId = RunId()
    """The newest run. All other fields belong to it, except for `number`."""
    run_above: int = 0
    """Newest generation of the previous runs; the run's generations have higher numbers."""
    run_aliases: tuple[RunId, ...] = ()
    """Runs whose participants belong to `run`: they began after Redis had lost it and before its
    members were back."""
    past_runs: tuple[PastRun, ...] = ()
    """The newest past runs, up to Policy.most_past_runs, oldest first."""
    phase: JobPhase = JobPhase.WAITING
    number: int = 0
    """Number of the newest generation; 0 before the first. Never decreases, even from one run to
    the next."""
    generation: Generation | None = None
    """The newest generation, even if it has ended because members are missing (phase WAITING)."""
    members: Mapping[str, Member] = field(default_factory=dict)
    """Live members; disjoint from `departed`."""
    departed: Mapping[str, Departure] = field(default_factory=dict)
    """Former members by id, in the order in which they ended. These ids are never reused."""
    servers: Mapping[str, Server] = field(default_factory=dict)
    layout: ShardLayout | None = None
    """Partitions of the declared tensors and their owners. Once set, only owners change, together
    with its epoch."""
    moves: Moves = field(default_factory=Moves)
    """Empty before there is a layout."""
    loaders: Mapping[str, Loader] = field(default_factory=dict)
    last_order: int = 0
    """Highest Member.ready_order assigned so far."""
    accusations: Mapping[Pair, int] = field(default_factory=dict)
    """Number of accusations between two live members."""
    ending: JobEnding = JobEnding.NONE
    """NONE if and only if the phase is neither STOPPING nor FINISHED. FAILED is final."""
    stop_reason: str = ""
    """Reason why the job stops or has stopped, in phases STOPPING and FINISHED."""
    ended_unix_ms: int = 0
    """Time at which the run ended; 0 unless the phase is FINISHED."""
    departing: bool = False
    """True if a ranked member has left at the common last step boundary: no further generation is
    formed."""

    population: Mapping[MemberPhase, int] = field(default_factory=dict)
    """Derived, not written: number of `members` in each phase; phases without members may be
    missing."""
    grace_until_ms: int | None = None
    """In memory only. End of the wait for further joiners; None if nobody waits for a rank."""
    incident: Incident | None = None
    """In memory only, since members repeat their report when they reconnect."""
    formed_ms: int | None = None
    """In memory only. Time at which the newest generation was written."""
    broken_streams: Mapping[str, int] = field(default_factory=dict)
    """In memory only. Members whose streams ended before they left, each with the time (Now.ms),
    until the cause is decided."""
    recovery: Recovery | None = None
    """In memory only. None: no member knew of a generation that Redis did not have."""
    stall: Stall | None = None
    """In memory only. None: no step is known to be stalled."""
    stragglers: Mapping[str, Straggler] = field(default_factory=dict)
    """In memory only. By member id."""
    kept_out_until_ms: Mapping[str, int] = field(default_factory=dict)
    """In memory only. Earliest time at which each QUARANTINED member may return."""
    standby_text: str | None = None
    """In memory only. Reason for the wait last sent to the ready members."""
    standby_sent_ms: int | None = None
    """In memory only. Time at which all of them last received it."""
    looked_ms: int | None = None
    """In memory only. Time of the last check for stalled steps."""
    look_at_moves_ms: int | None = 0
    """In memory only. Time at which to check for a due move of partitions; None if nothing has
    changed since the last check."""
    failed_receivers: Mapping[int, FailedServer] = field(default_factory=dict)
    """In memory only. Receivers excluded after a failed move of partitions that was not the giver's
    fault, by index of the place."""
    failed_givers: Mapping[int, FailedServer] = field(default_factory=dict)
    """In memory only. Givers excluded after a failed move of partitions that was their own fault,
    by index of the place."""
    servers_awaited: int = 0
    """In memory only. Number of parameter servers missing when a worker last declared its
    tensors."""
    replicas: ReplicasSeen | None = None
    """In memory only. State digests of members after their last step; None if no leaving member has
    reported one."""
    fresh_failures: int = 0
    """In memory only. Number of consecutive generations whose collectives failed before
    Policy.fresh_generation_ms."""

    def in_phase(self, phase: MemberPhase) -> int:
        """Returns the number of members in `phase`."""
        return self.population.get(phase, 0)

    @property
    def waits_for(self) -> str:
        """Text that says what training waits for and why; empty if no wait is known."""
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
        """True if the job has neither a member nor a live server."""
        return not self.members and not any(server.alive for server in self.servers.values())

    @property
    def is_over(self) -> bool:
        """True if no further generation will be formed."""
        return self.phase is JobPhase.FINISHED or (
            self.phase is JobPhase.STOPPING and self.departing
        )
