"""A job as described by its coordinator, with its members and parameter servers. Plain values;
nothing here sends requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from shoal.client.result import Result


class JobPhase(StrEnum):
    """Phase of a job."""

    UNKNOWN = "unknown"
    """A phase unknown to this release."""
    WAITING = "waiting"
    """Fewer than `min_workers` members are ready, so nobody trains."""
    RUNNING = "running"
    STOPPING = "stopping"
    """Asked to stop: members leave at their next step boundary."""
    FINISHED = "finished"
    """Ended; `Job.ending` gives the outcome."""


class JobEnding(StrEnum):
    """Outcome of a job that ends or has ended."""

    UNKNOWN = "unknown"
    """An outcome unknown to this release."""
    COMPLETED = "completed"
    """A member finished its script."""
    STOPPED = "stopped"
    """Asked to stop before a script finished."""
    FAILED = "failed"


class MemberPhase(StrEnum):
    """Phase of a member."""

    UNKNOWN = "unknown"
    """A phase unknown to this release."""
    JOINED = "joined"
    """Its script runs up to its first batch."""
    READY = "ready"
    """It waits for a rank in the next generation."""
    RANKED = "ranked"
    DRAINING = "draining"
    """Leaves at its next step boundary."""
    QUARANTINED = "quarantined"
    """Excluded until it can reach its peers again."""


class ServerRole(StrEnum):
    """Role of a parameter server in its place."""

    UNKNOWN = "unknown"
    """A role unknown to this release."""
    PRIMARY = "primary"
    BACKUP = "backup"


@dataclass(frozen=True, kw_only=True)
class Member:
    """A worker known to the coordinator, with its last reported progress."""

    member_id: str
    phase: MemberPhase
    rank: int | None
    """Rank in the newest generation; None if it has none."""
    host: str
    pid: int
    metrics_address: str | None
    """host:port of its /metrics."""
    joined: datetime
    step: int
    """Number of optimizer steps it has committed."""
    epoch: int
    samples: int
    """Number of its own samples in committed steps."""
    samples_per_s: float
    """Own rate over about the last second."""
    loss: float | None
    """Last loss reported by train_step or shoal.report; None if never."""
    step_time: timedelta
    """Median over the last steps."""
    busy_time: timedelta
    """Part of `step_time` in which it did not wait for its peers."""
    waiting: timedelta
    """Time for which it has been waiting for its peers without interruption."""
    waiting_in: str | None
    staleness: float
    """Versions between its last pull and its last push (async_sgd)."""
    note: str | None
    """Note for people if it slows the others down or has been silent for long."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Last values of the other numbers that it reports (`shoal.report`), by name."""
    steps_in_all: int | None = None
    """Number of steps that the run will have committed at its end; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A parameter server."""

    server_id: str
    place: int
    """Number in the shard map; a backup has that of its primary."""
    role: ServerRole
    address: str | None
    """host:port"""
    metrics_address: str | None
    alive: bool
    in_sync: bool
    """True if a backup has everything that its primary acknowledged."""
    draining: bool
    """True if its partitions are being moved to other servers."""
    partitions: int
    value_bytes: int
    """Bytes of the values, without optimizer state."""


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """A job in a list."""

    job_id: str
    phase: JobPhase
    generation: int
    """Newest generation; 0 if none yet."""
    world_size: int
    """Number of ranks in it."""
    result: Result | None = None
    """Result of a job submitted here; None while it runs, or if only its coordinator knows."""


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A run of a job that has ended."""

    number: int
    began: datetime
    ended: datetime
    ending: JobEnding
    reason: str | None
    """For people."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """State of a job's newest run."""

    job_id: str
    run: int
    """Number of the newest run; the first one is 1."""
    phase: JobPhase
    ending: JobEnding | None
    """None while it runs."""
    ending_reason: str | None
    """For people."""
    generation: int
    """Newest generation; 0 if none yet."""
    world_size: int
    """Number of ranks in it."""
    min_workers: int
    max_workers: int
    members: tuple[Member, ...]
    """Ranked members first, in rank order."""
    servers: tuple[Server, ...]
    waits_for: str | None
    """Explanation of the current wait, for people; None if nothing is stalled."""
    past_runs: tuple[PastRun, ...]
    """The latest past runs, oldest first."""
    now: datetime
    """Time by the clock of the coordinator's Redis, like all times here."""
    steps: int = 0
    """Committed steps of the newest run, also after its end."""
    steps_in_all: int | None = None
    """Number of steps that it will have committed at its end; None if unknown."""
