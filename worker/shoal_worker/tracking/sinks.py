"""The data that a sink receives for a run (points, events, spans and log lines), and the interface
of a sink.

A sink writes to one tracker, such as MLflow. `delivery.py` provides queues, retries and threads for
all sinks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, Self, TypeAlias

from shoal_worker.elastic.session.session import Session


@dataclass(frozen=True)
class TrackedRun:
    """Identifies a run to a sink. `job` and `key` do not depend on which rank writes, and do not
    change if the run is resumed."""

    job: str
    """Name of the job, for display; empty if it has none."""
    key: str
    """Unique key of the run."""
    place: str = ""
    """Host of the writing process, and the index of the process on that host. They stay the same if
    the process gets a different rank."""

    @classmethod
    def of(cls, session: Session) -> Self:
        """Returns the run of a session."""
        settings, key = session.settings, session.run
        if session.is_asynchronous or not key:
            # a worker of async_sgd may begin at any time; or the run has been restarted from one of
            # its checkpoints
            key = f"{settings.job_id} {settings.run}"
        return cls(
            job=settings.job_id if session.elastic else "",
            key=key,
            place=f"{settings.host}/{settings.local_index}",
        )


class EventKind(StrEnum):
    """Kinds of events that trackers show together with a run's numbers."""

    FAULT = "fault"
    """A fault aborted a step, which is repeated."""
    JOIN = "join"
    """Ranks joined."""
    LEAVE = "leave"
    """Ranks left: they died, or were drained."""
    GENERATION = "generation"
    """Training continues in a new generation."""
    RETURN = "return"
    """Training continues from an earlier step, because the run has returned to a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Points:
    """Numbers that belong to one committed step."""

    step: int
    time_ns: int
    """Time of the commit, in nanoseconds since the epoch."""
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event in a run, such as a fault or a join."""

    step: int
    """The first step committed after the event."""
    time_ns: int
    kind: EventKind
    text: str
    """One line of text, for display."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A period of one rank's work: some steps, the formation of a generation, a checkpoint, or a
    call to a service."""

    step: int
    """Newest committed step at the end of the period."""
    name: str
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)
    error: str = ""
    """Reason why the work failed; empty if it succeeded."""


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """A warning or an error from one rank's log."""

    step: int
    """Newest committed step at the time of the message."""
    time_ns: int
    level: int
    """Level as in `logging`: WARNING, ERROR or CRITICAL."""
    logger: str
    text: str


Report: TypeAlias = Points | Event | Span | LogLine


class Sink(Protocol):
    """Writes a run to one tracker. All calls in a process come from one thread. They may block,
    because training does not wait for that thread. If a call raises an error, it is retried later
    with the same arguments; before `write` is retried, `open` is called again. New reports wait
    until the call succeeds."""

    on_every_rank: bool
    """True if each rank writes its own reports, including spans and log lines. If False, only one
    rank writes at a time, and it writes no spans or log lines."""

    def open(self, *, run: TrackedRun, step: int) -> None:
        """Opens the sink, or reopens it after an error. `run`: has the same `key` and `job`
        whichever rank opens the sink. `step`: the next step to be written. If the tracker already
        has data for this step or later ones, the sink must ensure that no step appears twice."""

    def write(self, reports: Sequence[Report]) -> None:
        """Writes reports in order. Returns once the tracker has received them. The numbers of one
        step may be in several reports."""

    def close(self, *, ended: bool) -> None:
        """Closes the sink, which may be opened again. `ended`: True if this rank is leaving the
        run."""
