"""A job as described by its coordinator, with its members and parameter servers. Plain values that
send no requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from shoal.client.result import Result


class JobPhase(StrEnum):
    """Phase of a job."""

    UNKNOWN = "unknown"
    """A phase that this release does not know."""
    WAITING = "waiting"
    """Fewer than `min_workers` members are ready, so nobody trains."""
    RUNNING = "running"
    STOPPING = "stopping"
    """The job was asked to stop: members leave at their next step boundary."""
    FINISHED = "finished"
    """The job has ended; `Job.ending` is the outcome."""


class JobEnding(StrEnum):
    """Outcome of a job that ends or has ended."""

    UNKNOWN = "unknown"
    """An outcome that this release does not know."""
    COMPLETED = "completed"
    """A member finished its script."""
    STOPPED = "stopped"
    """The job was asked to stop before a script finished."""
    FAILED = "failed"


class MemberPhase(StrEnum):
    """Phase of a member."""

    UNKNOWN = "unknown"
    """A phase that this release does not know."""
    JOINED = "joined"
    """The member's script runs up to its first batch."""
    READY = "ready"
    """The member waits for a rank in the next generation."""
    RANKED = "ranked"
    DRAINING = "draining"
    """The member leaves at its next step boundary."""
    QUARANTINED = "quarantined"
    """The member is excluded until it can reach its peers again."""


class MachineCondition(StrEnum):
    """Condition of a machine that is not healthy."""

    UNKNOWN = "unknown"
    """A condition that this release does not know."""
    LEAVING = "leaving"
    """The provider has announced that the machine will be taken away, so its workers leave."""
    UNHEALTHY = "unhealthy"
    """A health check failed, so workers on it are refused."""
    EXCLUDED = "excluded"
    """Workers of the machine died again and again, so its workers are refused."""


class ServerRole(StrEnum):
    """Role of a parameter server in its place."""

    UNKNOWN = "unknown"
    """A role that this release does not know."""
    PRIMARY = "primary"
    BACKUP = "backup"


@dataclass(frozen=True, kw_only=True)
class Member:
    """A worker known to the coordinator, with its last reported progress."""

    member_id: str
    phase: MemberPhase
    rank: int | None
    """Rank in the newest generation; None if the member has none."""
    host: str
    pid: int
    metrics_address: str | None
    """Address (host:port) of the member's /metrics; None if it has none."""
    joined: datetime
    step: int
    """Number of optimizer steps that the member has committed."""
    epoch: int
    samples: int
    """Number of the member's own samples in committed steps."""
    samples_per_s: float
    """Samples per second of this member, over about the last second."""
    loss: float | None
    """Last loss reported by train_step or shoal.report; None if never."""
    step_time: timedelta
    """Median duration of a step over the last steps."""
    busy_time: timedelta
    """Part of `step_time` in which the member did not wait for its peers."""
    waiting: timedelta
    """Time for which the member has been waiting for its peers without interruption."""
    waiting_in: str | None
    staleness: float
    """Number of versions between the member's last pull and its last push (async_sgd)."""
    note: str | None
    """Note for people, if the member slows the others down or has been silent for long; otherwise
    None."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Last values of the other numbers that the member reports (`shoal.report`), by name."""
    steps_in_all: int | None = None
    """Number of steps that the run will have committed at its end; None if unknown."""
    share: float | None = None
    """Number of micro-batches of the member in each step, relative to an equal part, if they are
    dealt by speed; otherwise None."""
    upload_backlog_bytes: int = 0
    """Bytes of checkpoints on the member's disk that are not yet in the object storage."""
    script_line: str | None = None
    """Line of the script that the member executes, and what the line waits for, if the member has
    made no progress for a while; otherwise None."""
    last_wait: str | None = None
    """Last collective, or other wait for peers, that the member completed."""
    stacks: str | None = None
    """Python stacks of the member, innermost call first, while a step is stalled; otherwise
    None. The coordinator keeps those of at most 32 members."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A parameter server."""

    server_id: str
    place: int
    """Index of the server's place in the shard map; a backup has the place of its primary."""
    role: ServerRole
    address: str | None
    """Address of the server (host:port); None if it serves nobody yet."""
    metrics_address: str | None
    alive: bool
    in_sync: bool
    """True if a backup has received everything that its primary has acknowledged."""
    draining: bool
    """True if its partitions are being moved to other servers."""
    partitions: int
    value_bytes: int
    """Bytes of the values, without optimizer state."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine that is not healthy."""

    host: str
    condition: MachineCondition
    reason: str
    """Reason of the condition, for people."""
    since: datetime


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """A job in a list of jobs."""

    job_id: str
    phase: JobPhase
    generation: int
    """Newest generation; 0 if there is none yet."""
    world_size: int
    """Number of ranks in the newest generation."""
    result: Result | None = None
    """Result of a job submitted from this machine. None while the job runs, or if only its
    coordinator knows the result."""


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A run of a job that has ended."""

    number: int
    began: datetime
    ended: datetime
    ending: JobEnding
    reason: str | None
    """Reason of the outcome, for people; None if there is none."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """State of a job's newest run."""

    job_id: str
    run: int
    """Number of the newest run; the first one is 1."""
    phase: JobPhase
    ending: JobEnding | None
    """Outcome of the run; None while it runs."""
    ending_reason: str | None
    """Reason of the outcome, for people; None if there is none."""
    generation: int
    """Newest generation; 0 if there is none yet."""
    world_size: int
    """Number of ranks in the newest generation."""
    min_workers: int
    max_workers: int
    members: tuple[Member, ...]
    """Members of the job: ranked ones first, in rank order."""
    servers: tuple[Server, ...]
    waits_for: str | None
    """Explanation of the current wait, for people; None if nothing is stalled."""
    past_runs: tuple[PastRun, ...]
    """The latest past runs, oldest first."""
    now: datetime
    """Time at which the state was read, by the clock of the coordinator's Redis, like all other
    times."""
    steps: int = 0
    """Committed steps of the newest run, also after the run has ended."""
    steps_in_all: int | None = None
    """Number of steps that the newest run will have committed at its end; None if unknown."""
    machines: tuple[Machine, ...] = ()
    """Machines that are not healthy, by host name."""
