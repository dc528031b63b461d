"""Heartbeat state of members and servers. It is kept in memory, never written to Redis, and read by
the core when it makes decisions.

The module contains immutable values and pure functions; the shell owns the mappings and replaces
their entries. A coordinator that starts gives every member a fresh pulse, so that all leases
restart before any can expire.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

BUSY_CPU_S: Final = 0.5
"""Processor time, in seconds, that a member must use to count as working rather than hung. Sending
heartbeats for a minute takes several times less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Contents of a heartbeat. shoal.v1.Progress describes most of the fields."""

    step: int = 0
    steps_in_all: int = 0
    epoch: int = 0
    sequence: int = 0
    samples_per_s: float = 0.0
    loss: float = float("nan")
    step_time_s: float = 0.0
    samples: int = 0
    staleness: float = 0.0
    waiting_s: float = 0.0
    waiting_in: str = ""
    busy_time_s: float = 0.0
    cpu_s: float = 0.0
    server_wait_s: float = 0.0
    awaited_server: str = ""
    script_line: str = ""
    share: float = 0.0
    upload_backlog_bytes: int = 0
    last_wait: str = ""
    stacks: str = ""
    busy_link: tuple[int, float] | None = None
    """Rank at the other end of the busy connection, and its bytes per second; None if no connection
    is permanently busy."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    out_of_reach: tuple[int, ...] = ()
    """Ranks that the member cannot reach: shoal.v1.Heartbeat.out_of_reach."""
    in_reach: bool = False
    """True if a quarantined member can connect again to the peer that it could not reach
    (shoal.v1.Heartbeat.in_reach)."""
    spare: bool = False
    """True if the member has a rank but no part of the model, and is waiting for a generation that
    gives it one (shoal.v1.Heartbeat.spare)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """State of one member as of its last heartbeat."""

    heard_ms: int
    moved_ms: int
    """Time at which progress.sequence last increased, by the clock of Now.ms."""
    active_ms: int = 0
    """Time at which the member had last made progress, or used a further BUSY_CPU_S of processor
    time."""
    active_cpu_s: float = 0.0
    """Value of progress.cpu_s at `active_ms`."""
    detached_ms: int | None = None
    """Time at which the session's stream closed; None while the stream is open."""
    generation: int = 0
    """Newest generation that the member has reported to be working in; 0 if it has not reported any
    since this coordinator started."""
    progress: Progress = field(default_factory=Progress)

    @property
    def attached(self) -> bool:
        """True if the session's stream is open."""
        return self.detached_ms is None

    @property
    def waited_ms(self) -> int:
        """Duration in milliseconds of the member's wait for its peers, as of its last heartbeat; 0
        if it was not waiting."""
        return int(1000 * self.progress.waiting_s)

    def silent_ms(self, now_ms: int) -> int:
        """Returns the milliseconds since the last heartbeat."""
        return now_ms - self.heard_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerPulse:
    """State of one parameter server as of its last heartbeat."""

    heard_ms: int
    attached: bool = True
    """True if the session's stream is open."""
    stored_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Pulses:
    """Heartbeat states of one job, by member id and by server id."""

    members: Mapping[str, Pulse] = field(default_factory=dict)
    servers: Mapping[str, ServerPulse] = field(default_factory=dict)
    newest: Progress = field(default_factory=Progress)
    """Newest progress of any member, kept after the members have left."""


def beaten(pulse: Pulse, now_ms: int, generation: int, progress: Progress) -> Pulse:
    """Returns the pulse of a member after a heartbeat. The generation and the sequence never
    decrease, because heartbeats of an older stream may arrive late."""
    moved = progress.sequence > pulse.progress.sequence
    active = moved or progress.cpu_s >= pulse.active_cpu_s + BUSY_CPU_S
    if pulse.progress.stacks and not progress.stacks and not moved:
        progress = replace(progress, stacks=pulse.progress.stacks)  # not sent again
    return Pulse(
        heard_ms=now_ms,
        moved_ms=now_ms if moved else pulse.moved_ms,
        active_ms=now_ms if active else pulse.active_ms,
        active_cpu_s=progress.cpu_s if active else pulse.active_cpu_s,
        detached_ms=pulse.detached_ms,
        generation=max(generation, pulse.generation),
        progress=progress if progress.sequence >= pulse.progress.sequence else pulse.progress,
    )


def located(pulse: Pulse, script_line: str, stacks: str) -> Pulse:
    """Returns the pulse of a silent member whose stacks were read by another member."""
    return replace(pulse, progress=replace(pulse.progress, script_line=script_line, stacks=stacks))


def attached(pulse: Pulse | None, now_ms: int) -> Pulse:
    """Returns the pulse of a member whose stream has just opened. `pulse`: previous pulse; None for
    a new member."""
    if pulse is None:
        return Pulse(heard_ms=now_ms, moved_ms=now_ms, active_ms=now_ms)
    return replace(pulse, heard_ms=now_ms, detached_ms=None)


def detached(pulse: Pulse, now_ms: int) -> Pulse:
    """Returns the pulse of a member whose stream has closed. Its lease continues to run."""
    return replace(pulse, detached_ms=now_ms)


def expired(
    pulses: Mapping[str, Pulse] | Mapping[str, ServerPulse], now_ms: int, lease_ms: int
) -> Iterable[str]:
    """Returns the ids of members or servers whose last heartbeat is older than a lease."""
    oldest = now_ms - lease_ms
    return [name for name, pulse in pulses.items() if pulse.heard_ms < oldest]
