"""State of one job: frozen values with their invariants documented on the fields.

Everything here is written to Redis (state/codec.py), except for fields documented as in memory
only, which start empty when the coordinator starts. Heartbeats change nothing here; pulse.py
contains their contents.
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
    """Milliseconds of a monotonic clock that pauses while the coordinator is stopped. Waits and
    leases depend on this clock. Its origin is arbitrary."""
    unix_ms: int
    """Redis server time, recorded for people and clients and never compared."""


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
    """Number of the run: 1, 2, 3, ... within a job."""
    began_unix_ms: int = 0
    """Start of the run, which distinguishes it from a run with the same number from before Redis
    lost the job. 0 if unknown, as for a job written by an older release."""

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
    """Identity and addresses that a process reports when it joins."""

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
    """Digest of the key that the member presents with every call. Empty: the member has no key, so
    any other process of its job can impersonate it."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One live worker process. A member is RANKED if and only if it has a rank in the newest
    generation and does not have to leave."""

    identity: Identity
    phase: MemberPhase
    joined_unix_ms: int
    replays: bool
    """True if the job already had a generation when this member joined. The member then replays its
    script before it is ready."""
    ready_order: int = 0
    """Position among all `ready` messages of the job: the longest-waiting member gets a rank first.
    0 until the member is ready."""
    holds_state: bool = False
    """True if the member has worked in a generation and therefore holds part of the training state.
    For a member of the newest generation, Rank.joining records this instead; this flag is set when
    the member loses its place."""
    works_in: int = 0
    """Only while DRAINING: the generation in which the member continues after a generation without
    it was written. 0: the member is in the newest generation, or in none."""
    reason: str = ""
    """Reason why the member is DRAINING or QUARANTINED."""
    apart_from: str = ""
    """Only while QUARANTINED: the member with which this member cannot work. This member becomes
    READY again once it reaches the other member or the other member is gone."""

    @property
    def member_id(self) -> str:
        return self.identity.member_id


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine that is not healthy."""

    condition: MachineCondition
    """Never HEALTHY."""
    reason: str
    """Human-readable reason for the condition."""
    since_unix_ms: int

    @property
    def refuses(self) -> bool:
        """True if new members from this machine are refused."""
        return self.condition is not MachineCondition.LEAVING


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Record of a member that has left."""

    ending: str
    """Value of events.Ending or events.LeaveReason."""
    unix_ms: int
    rank: int = -1
    """Rank of the member if it was in the newest generation when it left; otherwise -1."""
    steps: int | None = None
    """Optimizer steps that the member had committed; None if it did not report them."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One place in a generation. Its number is its position in Generation.ranks."""

    member_id: str
    host: str
    local_rank: int
    """Rank within the host: 0 to local_world_size-1, in rank order."""
    local_world_size: int
    """Number of ranks on this host, which are adjacent."""
    donor_address: str
    joining: bool
    """True if the member is not known to have worked in any generation, so that it holds no
    state."""
    donor_key: str = ""

    @cached_property
    def line(self) -> str:
        """Line of the rank in the input of the rank table's digest."""
        return rank_table.line(self.member_id, self.host, self.donor_address, self.donor_key)

    def is_same_place(self, other: Rank) -> bool:
        """Returns whether the entry `other` from the table of another generation equals this
        one."""
        return self is other or self.line == other.line


@dataclass(frozen=True, kw_only=True)
class RankChange:
    """Difference between the ranks of a generation and the ranks of an older one:
    shoal.v1.RankChange."""

    since: int
    """Number of the older generation."""
    removed: tuple[int, ...]
    """Removed ranks of the older generation, ascending."""
    added: tuple[int, ...]
    """Added ranks of the newer generation, ascending. Unchanged ranks keep their order."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One agreed membership. A generation is written to Redis before it is announced to anyone."""

    number: int
    """Number of the generation, at least 1 and higher than any earlier number in this job."""
    nonce: str
    """Random identifier: 32 hexadecimal digits."""
    cause: Cause
    ranks: tuple[Rank, ...]
    """Ranks of the generation, with distinct members; the ranks of one host are adjacent. There are
    min_workers (after the first generation, min_survivors) to max_workers ranks."""
    interrupts_below: int
    """Members that work in a generation below this number leave it at once. Never decreases, since
    a member may miss generations in between."""
    created_unix_ms: int
    change: RankChange | None = None
    """Difference from the ranks of the previous generation. None if there was no previous
    generation, or if the difference is too large to be worth sending."""
    written: tuple[int, ...] | None = ()
    """Generations, including this one, that are stored as changes since the last full table. Empty:
    the full table of this generation is stored. None: the table is stored in a form that no change
    can follow."""

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
    """One parameter server: the primary of a place, or its backup."""

    server_id: str
    index: int
    """Place of the server (server_index), >= 0. Places drained for good leave gaps. Each place has
    one primary and, if the job has backups, at most one backup."""
    address: str
    """Address of the server; empty until it accepts calls."""
    metrics_address: str
    host: str
    pid: int
    alive: bool
    incarnation: str = ""
    """Identity of the process, which distinguishes it from a later process in its place. In a
    container both have the same host and pid."""
    role: ServerRole = ServerRole.PRIMARY
    epoch: int = 1
    """The shoal.v1.ServerPlace.epoch of a primary's place; meaningless for a backup."""
    in_sync: bool = False
    """True if the primary acknowledges nothing that this live backup does not have. The backup then
    takes over if the primary is lost."""

    @property
    def serves(self) -> bool:
        """True if workers can use the server."""
        return self.alive and self.role is ServerRole.PRIMARY and bool(self.address)


@dataclass(frozen=True, kw_only=True)
class Move:
    """Hand-over of partitions from one server to another: shoal.v1.MovePartitions
    (docs/explanation/parameter-servers.md#moving-partitions)."""

    number: int
    partitions: tuple[int, ...]
    """Partition ids; at least one, all owned by the giver."""
    giver: int
    """Index of the place that owns the partitions."""
    giver_incarnation: str
    """Process in the giver's place that hands the partitions over. If it dies, data already sent
    may still arrive late. Its successor must therefore repeat the move under another number unless
    the partitions have already left."""
    receiver: int
    """Index of the place that will own the partitions."""

    def concerns(self, index: int) -> bool:
        """Returns whether a place is the giver or the receiver."""
        return index in (self.giver, self.receiver)


@dataclass(frozen=True, kw_only=True)
class Drained:
    """Server process whose place was drained. It may not have been told to exit yet."""

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
    """The only move in progress, with the number `settled` + 1."""
    draining: Mapping[int, str] = field(default_factory=dict)
    """Index of a place that gives away all its partitions -> reason, for people. The entry is
    removed once all servers of the place have ended."""
    drained: Mapping[str, Drained] = field(default_factory=dict)
    """Server id -> its last drained process, in the order of draining, up to
    Policy.most_drained."""


@dataclass(frozen=True, kw_only=True)
class FailedServer:
    """Server process that is blamed for the last failed move to or from its place."""

    incarnation: str
    """Identity of the failed process; another process in its place has not failed."""
    failures: int
    """Number of consecutive failed moves; at least one."""
    until_ms: int
    """Earliest time at which the process may take part in a move again."""


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """Report of one member about a failed collective."""

    suspects: frozenset[str]
    timed_out: bool


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A failed collective for which no explanation is known yet."""

    generation: int
    opened_ms: int
    due_ms: int
    """Time at which a decision about the incident is due."""
    reports: Mapping[str, FailureReport]
    """Member id -> its report; at least one."""


def populate(members: Mapping[str, Member]) -> Mapping[MemberPhase, int]:
    """Returns the value of JobState.population for these members."""
    return Counter(member.phase for member in members.values())


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Recovery of generations that Redis has lost. Members that know such generations continue in
    the newest one until all have returned."""

    FOUND: ClassVar[int] = -1
    """`until_ms` of a recovery that was under way when the coordinator was restarted."""

    known: int
    """Newest generation that Redis has kept."""
    newest: int
    """Newest generation known to a member."""
    world_size: int
    """Number of ranks in the newest lost generation; 0 if unknown."""
    until_ms: int | None
    """Latest time at which a generation is written with the members that have returned. None: the
    generation has been written."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A stalled step with its latest explanation."""

    text: str
    reach: str
    """Part of the text that names the members that cannot reach each other."""
    reported_ms: int
    located: int = 0
    """Number of members named in the text with the line of the script that they execute."""
    readers: Mapping[str, str] = field(default_factory=dict)
    """Silent member -> member on its machine that reads its stacks."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A member that slows the others down."""

    text: str
    found_ms: int
    seen_ms: int
    is_named: bool
    """True if the member has slowed the others down for long enough to be named."""


Pair = tuple[str, str]
"""Two member ids in ascending order."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """Complete state of one job."""

    spec: JobSpec
    run: RunId = RunId()
    """The newest run. All other fields belong to this run, except for `number`."""
    run_above: int = 0
    """Newest generation of the previous runs. The generations of this run have higher numbers."""
    run_aliases: tuple[RunId, ...] = ()
    """Runs whose participants belong to `run`. These runs began after Redis had lost `run` and
    before its members returned."""
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
    """Former members by id, in the order in which they left. Their ids are never reused."""
    servers: Mapping[str, Server] = field(default_factory=dict)
    layout: ShardLayout | None = None
    """Partitions of the declared tensors and their owners. Once the layout is set, only its owners
    change, together with its epoch."""
    moves: Moves = field(default_factory=Moves)
    """State of moves of partitions; empty before there is a layout."""
    loaders: Mapping[str, Loader] = field(default_factory=dict)
    last_order: int = 0
    """Highest Member.ready_order assigned so far."""
    accusations: Mapping[Pair, int] = field(default_factory=dict)
    """Number of accusations between two live members."""
    machines: Mapping[str, Machine] = field(default_factory=dict)
    """Machines that are not healthy, by host name (Identity.host)."""
    ending: JobEnding = JobEnding.NONE
    """NONE if and only if the phase is neither STOPPING nor FINISHED. FAILED is final."""
    stop_reason: str = ""
    """Reason why the job stops or has stopped, in phases STOPPING and FINISHED."""
    ended_unix_ms: int = 0
    """Time at which the run ended; 0 unless the phase is FINISHED."""
    departing: bool = False
    """True if a ranked member has left at the last step boundary of all members. No further
    generation is formed."""

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
    """In memory only. Reason for the wait last sent to the ready members; None if none was sent."""
    standby_sent_ms: int | None = None
    """In memory only. Time at which all ready members last received the reason for the wait."""
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
    deaths_ms: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """In memory only. Host name -> times (Now.ms) of its members' latest deaths, ascending."""
    fresh_failures: int = 0
    """In memory only. Number of consecutive generations whose collectives failed before
    Policy.fresh_generation_ms."""

    def in_phase(self, phase: MemberPhase) -> int:
        """Returns the number of members in `phase`."""
        return self.population.get(phase, 0)

    @property
    def waits_for(self) -> str:
        """Human-readable description of what training waits for and why; empty if no wait is
        known."""
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
