"""Values that describe a job, its members and its parameter servers, as known to its
coordinator."""

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
    """Fewer than `min_workers` members are ready, so the job is not training."""
    RUNNING = "running"
    STOPPING = "stopping"
    """The job has been asked to stop: members leave at their next step boundary."""
    FINISHED = "finished"
    """The job has ended; `Job.ending` is the outcome."""


class JobEnding(StrEnum):
    """Outcome of a job that is stopping or has ended."""

    UNKNOWN = "unknown"
    """An outcome that this release does not know."""
    COMPLETED = "completed"
    """A member ran its script to completion."""
    STOPPED = "stopped"
    """The job was asked to stop before any member's script ended."""
    FAILED = "failed"


class MemberPhase(StrEnum):
    """Phase of a member."""

    UNKNOWN = "unknown"
    """A phase that this release does not know."""
    JOINED = "joined"
    """The member's script is running and has not reached its first batch."""
    READY = "ready"
    """The member is waiting for a rank in the next generation."""
    RANKED = "ranked"
    DRAINING = "draining"
    """The member has been asked to leave, and leaves at its next step boundary."""
    QUARANTINED = "quarantined"
    """The member cannot reach its peers, and is excluded until it can."""


class MachineCondition(StrEnum):
    """Condition of a machine that is being reclaimed, or on which the job refuses workers."""

    UNKNOWN = "unknown"
    """A condition that this release does not know."""
    LEAVING = "leaving"
    """The provider has announced that it will reclaim the machine, so its workers leave."""
    UNHEALTHY = "unhealthy"
    """A health check failed, so the job refuses workers on the machine."""
    EXCLUDED = "excluded"
    """Workers on the machine died repeatedly, so the job refuses workers on it."""


class ServerRole(StrEnum):
    """Role of a parameter server: primary or backup."""

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
    """Rank in the newest generation; None if the member has no rank in it."""
    host: str
    pid: int
    metrics_address: str | None
    """Address (host:port) of the member's /metrics; None if it does not serve metrics."""
    joined: datetime
    step: int
    """Number of optimizer steps that the member has committed."""
    epoch: int
    samples: int
    """Number of samples in committed steps that this member itself processed."""
    samples_per_s: float
    """Number of samples that this member processes per second, measured over roughly the last
    second."""
    loss: float | None
    """Last loss reported by train_step or shoal.report; None if never."""
    step_time: timedelta
    """Median duration of the member's latest steps."""
    busy_time: timedelta
    """Part of `step_time` that the member did not spend waiting for its peers."""
    waiting: timedelta
    """Duration of the member's current wait for its peers; zero if it is not waiting."""
    waiting_in: str | None
    staleness: float
    """Number of versions that the parameters had advanced between the member's last pull and its
    last push (async_sgd)."""
    note: str | None
    """Human-readable note if the member slows the others down or has been silent for long;
    otherwise None."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Last values of the other metrics that the member reported with `shoal.report`, by name."""
    steps_in_all: int | None = None
    """Total number of steps of the run; None if unknown."""
    share: float | None = None
    """Number of micro-batches that the member gets in each step, relative to an equal share. None
    unless micro-batches are distributed by speed, or a step has fewer micro-batches than ranks. In
    the second case, also None for a member that gets no micro-batch."""
    upload_backlog_bytes: int = 0
    """Bytes of checkpoints on the member's disk that are not yet in the object store."""
    script_line: str | None = None
    """Line of the script that the member is executing, and what the line is waiting for. None
    unless the member has made no progress for a while."""
    last_wait: str | None = None
    """The member's last completed collective or other wait for peers; None if unknown."""
    stacks: str | None = None
    """Python stacks of the member, innermost call first. None unless a step is stalled. The
    coordinator keeps the stacks of at most 32 members."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A parameter server."""

    server_id: str
    place: int
    """Index of the server in the shard map, the assignment of parameters to servers. A primary and
    its backup have the same index."""
    role: ServerRole
    address: str | None
    """Address of the server (host:port); None while it does not serve requests."""
    metrics_address: str | None
    alive: bool
    in_sync: bool
    """True if a backup has received all changes that its primary has acknowledged."""
    draining: bool
    """True if the server's partitions are being moved to other servers so that it can leave."""
    partitions: int
    value_bytes: int
    """Size of the parameters that the server stores, in bytes, without optimizer state."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine that is being reclaimed, or on which the job refuses workers."""

    host: str
    condition: MachineCondition
    reason: str
    """Human-readable reason for the condition."""
    since: datetime


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """Summary of a job in a list of jobs."""

    job_id: str
    phase: JobPhase
    generation: int
    """Newest generation; 0 if there is none yet."""
    world_size: int
    """Number of ranks in the newest generation."""
    result: Result | None = None
    """Result of a job submitted from this machine. None while the job is running, or if only its
    coordinator knows the result."""


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A run of a job that has ended."""

    number: int
    began: datetime
    ended: datetime
    ending: JobEnding
    reason: str | None
    """Human-readable reason for the outcome; None if there is none."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """State of a job's newest run."""

    job_id: str
    run: int
    """Number of the newest run, counted from 1."""
    phase: JobPhase
    ending: JobEnding | None
    """Outcome of the run; None while it is running."""
    ending_reason: str | None
    """Human-readable reason for the outcome; None if there is none."""
    generation: int
    """Newest generation; 0 if there is none yet."""
    world_size: int
    """Number of ranks in the newest generation."""
    min_workers: int
    max_workers: int
    members: tuple[Member, ...]
    """Members of the job. Members with a rank come first, in rank order."""
    servers: tuple[Server, ...]
    waits_for: str | None
    """Human-readable explanation of what training is waiting for; None if it is not stalled."""
    past_runs: tuple[PastRun, ...]
    """The latest past runs, oldest first."""
    now: datetime
    """Time at which this state was read. This and all other times are from the clock of the
    coordinator's Redis."""
    steps: int = 0
    """Number of committed steps of the newest run, kept after the run has ended."""
    steps_in_all: int | None = None
    """Total number of steps of the newest run; None if unknown."""
    machines: tuple[Machine, ...] = ()
    """Machines that are being reclaimed or on which the job refuses workers, ordered by host
    name."""
