"""What the coordinator knows of one job: frozen values with the invariants on the fields.

Everything here is written to Redis (state/codec.py), except where a field says that it lives in
memory only: such fields start afresh when the coordinator does. Heartbeats change nothing here;
what they say is in pulse.py.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from shoal_common import rank_table

from shoal_coordinator.membership.batches import Loader
from shoal_coordinator.membership.replicas import ReplicasSeen
from shoal_coordinator.membership.shards import ShardLayout
from shoal_coordinator.membership.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class Now:
    """The two clocks that a decision may use."""

    ms: int
    """Milliseconds of a clock that never steps back, and that stands while the coordinator is
    stopped; decides about waits and leases. Its origin means nothing."""
    unix_ms: int
    """Redis server time; written down for people and clients, never compared."""


class JobPhase(enum.StrEnum):
    """Values of shoal.v1.JobPhase, which describes them."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


class JobEnding(enum.StrEnum):
    """Values of shoal.v1.JobEnding, which describes them."""

    NONE = ""
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"


class MemberPhase(enum.StrEnum):
    """Values of shoal.v1.MemberPhase, which describes them."""

    JOINED = "joined"
    READY = "ready"
    RANKED = "ranked"
    DRAINING = "draining"
    QUARANTINED = "quarantined"


class Cause(enum.StrEnum):
    """Values of shoal.v1.Generation.Cause, which describes them."""

    START = "start"
    FAILURE = "failure"
    BORDER = "border"


@dataclass(frozen=True, kw_only=True)
class RunId:
    """Names a run of a job."""

    number: int = 1
    """1, 2, 3, ... within a job."""
    began_unix_ms: int = 0
    """Tells it from a run that had its number before Redis lost the job. 0: not known, as of a job
    that an older release wrote."""

    def __str__(self) -> str:
        return str(self.number)


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A run that is over."""

    run: RunId
    ended_unix_ms: int
    ending: JobEnding
    reason: str


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a process says of itself when it joins."""

    member_id: str
    host: str
    pid: int
    launcher_id: str
    local_index: int
    donor_address: str
    metrics_address: str
    donor_key: str = ""
    """Opens its donor: a secret of the members."""
    key_digest: str = ""
    """The digest of the key that it shows with every call. Empty: it has none, and others of its
    job can speak for it."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One live worker process. It is RANKED if and only if it has a rank in the newest generation
    and is not to leave."""

    identity: Identity
    phase: MemberPhase
    joined_unix_ms: int
    replays: bool
    """The job had a generation when this member joined: it replays its script before it is
    ready."""
    ready_order: int = 0
    """Grows from one `ready` to the next within a job: who waits longest gets a rank first. 0 until
    it is ready."""
    holds_state: bool = False
    """It has worked in a generation, so it has a part of the training state. Of a member with a
    place in the newest generation Rank.joining says so instead; it is set when the member loses
    that place."""
    works_in: int = 0
    """Only while DRAINING: the generation it goes on in after one without it was written. 0: it is
    in the newest one, or in none."""
    reason: str = ""
    """Why it is DRAINING or QUARANTINED."""
    apart_from: str = ""
    """Only while QUARANTINED: the member it cannot work with. When it reaches that one again, or
    that one is gone, it is READY again."""

    @property
    def member_id(self) -> str:
        return self.identity.member_id


@dataclass(frozen=True, kw_only=True)
class Departure:
    """The end of a member."""

    ending: str
    """How it ended: a value of events.Ending or events.LeaveReason."""
    unix_ms: int
    rank: int = -1
    """Its last one, if it was in the newest generation then; else -1."""
    steps: int = 0
    """Optimizer steps that it had committed, as far as it said."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One place in a generation; its number is its position in Generation.ranks."""

    member_id: str
    host: str
    local_rank: int
    """0 .. local_world_size-1, in rank order."""
    local_world_size: int
    """Ranks of this host, which are adjacent."""
    donor_address: str
    joining: bool
    """The member has not worked in any generation, as far as is known: it holds no state."""
    donor_key: str = ""

    @cached_property
    def line(self) -> str:
        """What the table's digest covers of it."""
        return rank_table.line(self.member_id, self.host, self.donor_address, self.donor_key)

    def is_same_place(self, other: Rank) -> bool:
        """Whether the table of another generation has the same entry."""
        return self is other or self.line == other.line


@dataclass(frozen=True, kw_only=True)
class RankChange:
    """How the ranks of a generation come from those of an older one: shoal.v1.RankChange."""

    since: int
    """The older one's number."""
    removed: tuple[int, ...]
    """Ranks of the older one, ascending."""
    added: tuple[int, ...]
    """Ranks of the newer one, ascending. The others keep their order."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One agreed membership. Written to Redis before anybody hears of it."""

    number: int
    """>= 1; higher than any before in this job, for ever."""
    nonce: str
    """32 hexadecimal digits."""
    cause: Cause
    ranks: tuple[Rank, ...]
    """From min_workers, or min_survivors after the first one, to max_workers of them; no member
    twice; the ranks of one host adjacent."""
    interrupts_below: int
    """Members that work in a generation below this number leave it at once. Never falls, since a
    member may miss generations between."""
    created_unix_ms: int
    change: RankChange | None = None
    """What the ranks differ in from those of the generation before; None: there was none, or it is
    more than is worth telling."""
    written: tuple[int, ...] | None = ()
    """The generations since the one whose table is written whole, this one included, of which the
    changes are written instead. Empty: the table of this one is written whole. None: it is, in a
    way that no change can follow."""

    @cached_property
    def table_digest(self) -> bytes:
        """Tells its table from others."""
        return rank_table.digest(rank.line for rank in self.ranks)

    @cached_property
    def rank_of(self) -> Mapping[str, int]:
        """Member id -> rank."""
        return {rank.member_id: position for position, rank in enumerate(self.ranks)}


class ServerRole(enum.StrEnum):
    """Values of shoal.v1.ServerRole, which describes them."""

    PRIMARY = "primary"
    BACKUP = "backup"


@dataclass(frozen=True, kw_only=True)
class Server:
    """One parameter server: the primary of a place, or its backup."""

    server_id: str
    index: int
    """The server's place (server_index), >= 0. Places that were left for good leave gaps. Each has
    one primary, and, if the job has them, one backup at most."""
    address: str
    """Empty: it serves nobody yet."""
    metrics_address: str
    host: str
    pid: int
    alive: bool
    incarnation: str = ""
    """Tells the process from one that was started in its place, which has the same host and pid in
    a container."""
    role: ServerRole = ServerRole.PRIMARY
    epoch: int = 1
    """The place's shoal.v1.ServerPlace.epoch, with its primary; a backup's means nothing."""
    in_sync: bool = False
    """A backup's, that is alive: the primary acknowledges nothing that it does not have. It takes
    the primary's place when that is lost."""

    @property
    def serves(self) -> bool:
        """Workers can use it."""
        return self.alive and self.role is ServerRole.PRIMARY and bool(self.address)


@dataclass(frozen=True, kw_only=True)
class Move:
    """Partitions that one server hands to another: shoal.v1.MovePartitions
    (docs/decisions/0200)."""

    number: int
    partitions: tuple[int, ...]
    """Ids; at least one, all of them the giver's."""
    giver: int
    """Index of the place that owns them."""
    giver_incarnation: str
    """The process there that is to hand them over. If it dies, what it handed over may arrive late,
    and so its successor has to do it under another number, unless they have left already."""
    receiver: int
    """Index of the place that is to own them."""

    def concerns(self, index: int) -> bool:
        """Whether a place gives or receives."""
        return index in (self.giver, self.receiver)


@dataclass(frozen=True, kw_only=True)
class Drained:
    """The process of a server whose place was drained. It may not have heard that it is to end."""

    incarnation: str
    index: int
    """The place that was drained, which another server may have by now."""
    reason: str
    """Why, as it is told."""


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Partitions on their way, and the places that are to be left or were."""

    settled: int = 0
    """Number of the newest move that is settled; 0: none was. Never falls."""
    under_way: Move | None = None
    """The only one; its number is one above `settled`."""
    draining: Mapping[int, str] = field(default_factory=dict)
    """Index of a place that gives away all that it has -> why, for people. A place whose servers
    have all ended is in it no more."""
    drained: Mapping[str, Drained] = field(default_factory=dict)
    """Server id -> its last process that was drained. In the order they were, up to
    Policy.most_drained."""


@dataclass(frozen=True, kw_only=True)
class FailedServer:
    """A process that did not come to own the partitions of the last move to it; or that could not
    give those of the last one from it."""

    incarnation: str
    """Another process in its place has not failed."""
    failures: int
    """Moves that failed in a row; at least one."""
    until_ms: int
    """When it may be given something again at the earliest, or give something."""


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """What one member said about a failed collective."""

    suspects: frozenset[str]
    timed_out: bool


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A failed collective that is not explained yet."""

    generation: int
    opened_ms: int
    due_ms: int
    """When to decide about it."""
    reports: Mapping[str, FailureReport]
    """Member id -> what it said; at least one."""


def populate(members: Mapping[str, Member]) -> Mapping[MemberPhase, int]:
    """JobState.population of these members."""
    return Counter(member.phase for member in members.values())


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Members know of generations that Redis has lost: they go on in the newest of them until they
    are all back."""

    known: int
    """The newest generation that Redis had kept."""
    newest: int
    """The newest that a member knows."""
    world_size: int
    """Its ranks; 0: not known."""
    until_ms: int | None
    """When a generation is written at the latest, with those that are back by then. None: it
    was."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A step that stands, as it was last explained."""

    text: str
    reach: str
    """The part of the text that says who cannot reach whom."""
    told_ms: int


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A member that holds the others back."""

    text: str
    found_ms: int
    seen_ms: int
    told: bool
    """It did so for long enough to be named."""


Pair = tuple[str, str]
"""Two member ids, the smaller first."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """All of one job."""

    spec: JobSpec
    run: RunId = RunId()
    """The newest run. All below is of it, but for `number`."""
    run_above: int = 0
    """The run's generations have numbers above this one, the newest of the runs before."""
    run_aliases: tuple[RunId, ...] = ()
    """Who belongs to one of these belongs to `run`: they were begun after Redis had lost it, before
    its members were back."""
    past_runs: tuple[PastRun, ...] = ()
    """The newest of those that are over, up to Policy.most_past_runs, oldest first."""
    phase: JobPhase = JobPhase.WAITING
    number: int = 0
    """Number of the newest generation; 0 before the first. Never falls, from one run to the next
    neither."""
    generation: Generation | None = None
    """The newest one, also when it is over because members are missing (phase WAITING)."""
    members: Mapping[str, Member] = field(default_factory=dict)
    """The live ones. None of them is in `departed`."""
    departed: Mapping[str, Departure] = field(default_factory=dict)
    """By member id, in the order they ended. These ids never come back."""
    servers: Mapping[str, Server] = field(default_factory=dict)
    layout: ShardLayout | None = None
    """How the declared tensors are cut and spread. Once it is there only owners change, with its
    epoch."""
    moves: Moves = field(default_factory=Moves)
    """Empty but for the defaults before there is a layout."""
    loaders: Mapping[str, Loader] = field(default_factory=dict)
    last_order: int = 0
    """The highest Member.ready_order given."""
    accusations: Mapping[Pair, int] = field(default_factory=dict)
    """How often two live members accused each other."""
    ending: JobEnding = JobEnding.NONE
    """NONE if and only if the phase is neither STOPPING nor FINISHED. What has FAILED stays so."""
    stop_reason: str = ""
    """Why the job stops, or has stopped, in phases STOPPING and FINISHED."""
    ended_unix_ms: int = 0
    """When the run ended; 0: it has not, that is, the phase is not FINISHED."""
    departing: bool = False
    """A ranked member has left at the border where all stop: no generation is formed any more."""

    population: Mapping[MemberPhase, int] = field(default_factory=dict)
    """Not written: how many of `members` are in each phase; phases without members may be
    missing."""
    grace_until_ms: int | None = None
    """In memory only. When the wait for further joiners ends; None: nobody waits for a rank."""
    incident: Incident | None = None
    """In memory only: members repeat their report when they reconnect."""
    formed_ms: int | None = None
    """In memory only. When the newest generation was written."""
    broken_streams: Mapping[str, int] = field(default_factory=dict)
    """In memory only. Members whose streams ended without a goodbye, and when (Now.ms), until it is
    decided what that means."""
    recovery: Recovery | None = None
    """In memory only. None: no member knew of a generation that Redis did not."""
    stall: Stall | None = None
    """In memory only. None: steps go on, as far as is known."""
    stragglers: Mapping[str, Straggler] = field(default_factory=dict)
    """In memory only. By member id."""
    kept_out_until_ms: Mapping[str, int] = field(default_factory=dict)
    """In memory only. When the members that are QUARANTINED may come back at the earliest."""
    standby_text: str | None = None
    """In memory only. Why those that are ready wait, as they were last told."""
    standby_told_ms: int | None = None
    """In memory only. When all of them were last told so."""
    looked_ms: int | None = None
    """In memory only. When it was last looked for steps that stand."""
    look_at_moves_ms: int | None = 0
    """In memory only. When to look which move of partitions is due; None: nothing has changed since
    that was done."""
    failed_receivers: Mapping[int, FailedServer] = field(default_factory=dict)
    """In memory only. By the index of a place to which the last move of partitions failed, by no
    fault of the giver's."""
    failed_givers: Mapping[int, FailedServer] = field(default_factory=dict)
    """In memory only. By the index of a place from which the last move of partitions failed, by its
    own fault."""
    servers_awaited: int = 0
    """In memory only. How many parameter servers were missing when a worker last declared its
    tensors."""
    replicas: ReplicasSeen | None = None
    """In memory only. What members held after their last step; None: none has left that said so."""
    fresh_failures: int = 0
    """In memory only. Collectives that failed in generations one after another, each before
    Policy.fresh_generation_ms."""

    def in_phase(self, phase: MemberPhase) -> int:
        """How many members are in `phase`."""
        return self.population.get(phase, 0)

    @property
    def waits_for(self) -> str:
        """Returns a text that says what training waits for and why; empty if no wait is known."""
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
        """Nobody is in it: no member, no live server."""
        return not self.members and not any(server.alive for server in self.servers.values())

    @property
    def is_over(self) -> bool:
        """No generation will be formed any more."""
        return self.phase is JobPhase.FINISHED or (
            self.phase is JobPhase.STOPPING and self.departing
        )
