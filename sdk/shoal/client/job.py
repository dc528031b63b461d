"""A job as its coordinator describes it, with its members and parameter servers. Plain values;
nothing here asks anybody."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from shoal.client.result import Result


class JobPhase(StrEnum):
    """Where a job stands."""

    UNKNOWN = "unknown"
    """A phase that this release does not know."""
    WAITING = "waiting"
    """Fewer members than `min_workers` are ready: nobody trains."""
    RUNNING = "running"
    STOPPING = "stopping"
    """It was asked to stop: members leave at their next border."""
    FINISHED = "finished"
    """It has ended; `Job.ending` says how."""


class JobEnding(StrEnum):
    """Why a job ends, or has ended."""

    UNKNOWN = "unknown"
    """An ending that this release does not know."""
    COMPLETED = "completed"
    """A member came to the end of its script."""
    STOPPED = "stopped"
    """It was asked to stop before that."""
    FAILED = "failed"


class MemberPhase(StrEnum):
    """Where a member stands."""

    UNKNOWN = "unknown"
    """A phase that this release does not know."""
    JOINED = "joined"
    """Its script runs up to its first batch."""
    READY = "ready"
    """It waits for a rank in the next generation."""
    RANKED = "ranked"
    DRAINING = "draining"
    """It leaves at its next border."""
    QUARANTINED = "quarantined"
    """It is kept out until it reaches its peers again."""


class ServerRole(StrEnum):
    """What a parameter server is for its place."""

    UNKNOWN = "unknown"
    """A role that this release does not know."""
    PRIMARY = "primary"
    BACKUP = "backup"


@dataclass(frozen=True, kw_only=True)
class Member:
    """A worker that the coordinator knows, and how far it is, as it said last."""

    member_id: str
    phase: MemberPhase
    rank: int | None
    """In the newest generation; None: it has none."""
    host: str
    pid: int
    metrics_address: str | None
    """host:port of its /metrics."""
    joined: datetime
    step: int
    """Optimizer steps that it has committed."""
    epoch: int
    samples: int
    """Its own samples that committed steps have counted."""
    samples_per_s: float
    """Over about the last second; its own."""
    loss: float | None
    """Told last, by train_step or shoal.report; None: never."""
    step_time: timedelta
    """Median of the last steps."""
    busy_time: timedelta
    """The part of `step_time` in which it did not wait for its peers."""
    waiting: timedelta
    """How long it has waited for its peers without a break."""
    waiting_in: str | None
    staleness: float
    """Versions between its last pull and its last push (async_sgd)."""
    note: str | None
    """For people: it holds the others back, or has not been heard of for long."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A parameter server."""

    server_id: str
    place: int
    """Its number in the shard map; a backup has its primary's."""
    role: ServerRole
    address: str | None
    """host:port"""
    metrics_address: str | None
    alive: bool
    in_sync: bool
    """A backup that has all that its primary acknowledged."""
    draining: bool
    """What it holds is being moved to the others."""
    partitions: int
    value_bytes: int
    """Their values; the optimizer's state is not counted."""


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """A job in a list."""

    job_id: str
    phase: JobPhase
    generation: int
    """The newest one; 0: none yet."""
    world_size: int
    """Ranks in it."""
    result: Result | None = None
    """How it ended, of one that was submitted here; None: it goes on, or only its coordinator
    knows."""


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A run of a job that is over."""

    number: int
    began: datetime
    ended: datetime
    ending: JobEnding
    reason: str | None
    """For people."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, as its newest run has it."""

    job_id: str
    run: int
    """The number of the newest run; the first one is 1."""
    phase: JobPhase
    ending: JobEnding | None
    """None: it goes on."""
    ending_reason: str | None
    """For people."""
    generation: int
    """The newest one; 0: none yet."""
    world_size: int
    """Ranks in it."""
    min_workers: int
    max_workers: int
    members: tuple[Member, ...]
    """Ranked ones first, in rank order."""
    servers: tuple[Server, ...]
    waits_for: str | None
    """Who waits for whom, for people; None: nothing stands."""
    past_runs: tuple[PastRun, ...]
    """The last ones before this, oldest first."""
    now: datetime
    """By the clock of the coordinator's Redis, as all moments here are."""
