"""What heartbeats say: kept in memory, never written to Redis, and given to the core as read-only evidence.

Pure values and functions. The shell holds the mappings and replaces entries; a coordinator that starts gives every member a fresh pulse,
so that all leases begin anew before any is judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """shoal.v1.Progress, which describes the fields."""

    step: int = 0
    epoch: int = 0
    sequence: int = 0
    samples_per_s: float = 0.0
    loss: float = float("nan")
    step_time_s: float = 0.0
    samples: int = 0
    staleness: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """The last that was heard of one member."""

    heard_ms: int
    moved_ms: int
    """When progress.sequence last grew, as seen here."""
    detached_ms: int | None = None
    """When its session's stream ended; None: it is open."""
    generation: int = 0
    """The newest generation it said it works in; 0: none yet, or none since this coordinator started."""
    progress: Progress = field(default_factory=Progress)

    @property
    def attached(self) -> bool:
        """Its session's stream is open."""
        return self.detached_ms is None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerPulse:
    """The last that was heard of one parameter server."""

    heard_ms: int
    attached: bool = True
    """Its session's stream is open."""
    stored_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Pulses:
    """All of one job, by member id and by server id."""

    members: Mapping[str, Pulse] = field(default_factory=dict)
    servers: Mapping[str, ServerPulse] = field(default_factory=dict)


def beaten(pulse: Pulse, now_ms: int, generation: int, progress: Progress) -> Pulse:
    """The pulse after a heartbeat. Generation and sequence never fall: heartbeats of an older stream may be late."""
    moved = progress.sequence > pulse.progress.sequence
    return Pulse(
        heard_ms=now_ms,
        moved_ms=now_ms if moved else pulse.moved_ms,
        detached_ms=pulse.detached_ms,
        generation=max(generation, pulse.generation),
        progress=progress if progress.sequence >= pulse.progress.sequence else pulse.progress,
    )


def attached(pulse: Pulse | None, now_ms: int) -> Pulse:
    """The pulse of a member whose stream has just opened; None: it is new."""
    return Pulse(heard_ms=now_ms, moved_ms=now_ms) if pulse is None else replace(pulse, heard_ms=now_ms, detached_ms=None)


def detached(pulse: Pulse, now_ms: int) -> Pulse:
    """The pulse of a member whose stream has ended. Its lease runs on."""
    return replace(pulse, detached_ms=now_ms)


def expired(pulses: Mapping[str, Pulse] | Mapping[str, ServerPulse], now_ms: int, lease_ms: int) -> Iterable[str]:
    """Ids whose last sign of life is more than a lease ago."""
    oldest = now_ms - lease_ms
    return [name for name, pulse in pulses.items() if pulse.heard_ms < oldest]
