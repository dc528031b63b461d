"""What heartbeats say: kept in memory, never written to Redis, and given to the core as read-only
evidence.

Pure values and functions. The shell holds the mappings and replaces entries; a coordinator that
starts gives every member a fresh pulse, so that all leases begin anew before any is judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

BUSY_CPU_S: Final = 0.5
"""Processor time that tells a member which works from one that hangs: several times what its
heartbeats take in a minute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """shoal.v1.Progress, which describes the fields, and what else a heartbeat says."""

    step: int = 0
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
    busy_link: tuple[int, float] | None = None
    """Rank and bytes a second."""
    out_of_reach: tuple[int, ...] = ()
    """shoal.v1.Heartbeat.out_of_reach"""
    in_reach: bool = False
    """shoal.v1.Heartbeat.in_reach"""
    spare: bool = False
    """shoal.v1.Heartbeat.spare"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """The last that was heard of one member."""

    heard_ms: int
    moved_ms: int
    """When progress.sequence last grew, as seen here."""
    active_ms: int = 0
    """When it last moved, or was seen to have used BUSY_CPU_S more of a processor."""
    active_cpu_s: float = 0.0
    """progress.cpu_s then."""
    detached_ms: int | None = None
    """When its session's stream ended; None: it is open."""
    generation: int = 0
    """The newest generation it said it works in; 0: none yet, or none since this coordinator
    started."""
    progress: Progress = field(default_factory=Progress)

    @property
    def attached(self) -> bool:
        """Its session's stream is open."""
        return self.detached_ms is None

    @property
    def waited_ms(self) -> int:
        """For how long it had waited for its peers when it was last heard of; 0: it did not."""
        return int(1000 * self.progress.waiting_s)

    def silent_ms(self, now_ms: int) -> int:
        """Since when it has not been heard of."""
        return now_ms - self.heard_ms


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
    """The pulse after a heartbeat. Generation and sequence never fall: heartbeats of an older
    stream may be late."""
    moved = progress.sequence > pulse.progress.sequence
    active = moved or progress.cpu_s >= pulse.active_cpu_s + BUSY_CPU_S
    return Pulse(
        heard_ms=now_ms,
        moved_ms=now_ms if moved else pulse.moved_ms,
        active_ms=now_ms if active else pulse.active_ms,
        active_cpu_s=progress.cpu_s if active else pulse.active_cpu_s,
        detached_ms=pulse.detached_ms,
        generation=max(generation, pulse.generation),
        progress=progress if progress.sequence >= pulse.progress.sequence else pulse.progress,
    )


def attached(pulse: Pulse | None, now_ms: int) -> Pulse:
    """The pulse of a member whose stream has just opened; None: it is new."""
    if pulse is None:
        return Pulse(heard_ms=now_ms, moved_ms=now_ms, active_ms=now_ms)
    return replace(pulse, heard_ms=now_ms, detached_ms=None)


def detached(pulse: Pulse, now_ms: int) -> Pulse:
    """The pulse of a member whose stream has ended. Its lease runs on."""
    return replace(pulse, detached_ms=now_ms)


def expired(
    pulses: Mapping[str, Pulse] | Mapping[str, ServerPulse], now_ms: int, lease_ms: int
) -> Iterable[str]:
    """Ids whose last sign of life is more than a lease ago."""
    oldest = now_ms - lease_ms
    return [name for name, pulse in pulses.items() if pulse.heard_ms < oldest]
