"""Snapshot of a job for metrics and pages: its state, its heartbeats and the time. Decisions do not
depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from shoal_coordinator.membership.model.pulse import Pulses
from shoal_coordinator.membership.model.state import (
    JobEnding,
    JobPhase,
    JobState,
    Now,
    Server,
    ServerRole,
)

_MOST_EXPLAINED: Final = 32
"""Maximum number of members whose stacks are shown."""


@dataclass(frozen=True, kw_only=True)
class ObservedJob:
    """A job at one moment. Immutable, so that other threads may read it."""

    state: JobState
    pulses: Pulses
    """Copy of the heartbeat state, unaffected by later heartbeats."""
    now: Now

    @property
    def trains(self) -> bool:
        """True if the members of a generation are training."""
        return self.state.generation is not None and self.state.phase in (
            JobPhase.RUNNING,
            JobPhase.STOPPING,
        )

    @property
    def world_size(self) -> int:
        """Number of ranks that are training; 0 while the job is waiting and after it has ended."""
        return (
            len(self.state.generation.ranks)
            if self.trains and self.state.generation is not None
            else 0
        )

    @cached_property
    def newest_step(self) -> int:
        """Highest step that any member has reported as committed; 0 if none has. After the run has
        ended, this includes members that have left."""
        steps = [pulse.progress.step for pulse in self.pulses.members.values()]
        if self.state.phase is JobPhase.FINISHED:
            steps += [departure.steps or 0 for departure in self.state.departed.values()]
            steps.append(self.pulses.newest.step)
        return max(steps, default=0)

    @cached_property
    def steps_in_all(self) -> int:
        """Total number of steps of the run, as reported by the member with the highest step; 0 if
        unknown."""
        newest = max(
            (pulse.progress for pulse in self.pulses.members.values()),
            key=lambda progress: progress.step,
            default=self.pulses.newest,
        )
        return newest.steps_in_all

    @cached_property
    def explained(self) -> frozenset[str]:
        """Members whose stacks are shown to explain a stalled step: at most `_MOST_EXPLAINED`,
        beginning with the members that others are waiting for. Empty if no step is stalled."""
        if self.state.stall is None:
            return frozenset()
        found = [
            (pulse.progress.waiting_s > 0, rank, member_id)
            for member_id, pulse in self.pulses.members.items()
            if pulse.progress.stacks
            and self.state.generation is not None
            and (rank := self.state.generation.rank_of.get(member_id)) is not None
        ]
        return frozenset(member_id for *_, member_id in sorted(found)[:_MOST_EXPLAINED])

    @property
    def without_progress_s(self) -> float:
        """Seconds since any rank last began a step, step boundary or operation; 0 while the job is
        not training."""
        ranked = (
            {}
            if self.state.generation is None or not self.trains
            else self.state.generation.rank_of
        )
        moved_ms = [
            pulse.moved_ms
            for member_id, pulse in self.pulses.members.items()
            if member_id in ranked
        ]
        return max(0, self.now.ms - max(moved_ms)) / 1000 if moved_ms else 0.0

    @cached_property
    def unserved_places(self) -> int:
        """Number of parameter server places (shares of the tensors) without a primary that serves
        requests, including places that have never had a primary; 0 after the run has ended."""
        if self.state.phase is JobPhase.FINISHED:
            return 0
        places = self._places
        missing = (
            0 if self.state.layout is not None else self.state.spec.parameter_servers - len(places)
        )
        return max(0, missing) + sum(
            not any(server.serves for server in servers) for servers in places.values()
        )

    @cached_property
    def unprotected_places(self) -> int:
        """Number of parameter server places (shares of the tensors) whose primary serves without a
        backup in sync; 0 after the run has ended, and in a job without backups."""
        if self.state.phase is JobPhase.FINISHED or not self.state.spec.parameter_server_backups:
            return 0
        return sum(
            any(server.serves for server in servers)
            and not any(
                server.alive and server.in_sync
                for server in servers
                if server.role is ServerRole.BACKUP
            )
            for servers in self._places.values()
        )

    @property
    def failed_unix_ms(self) -> int:
        """Time at which the newest run failed; 0 if the run has not ended or did not fail."""
        return self.state.ended_unix_ms if self.state.ending is JobEnding.FAILED else 0

    @cached_property
    def _places(self) -> dict[int, list[Server]]:
        places: dict[int, list[Server]] = {}
        for server in self.state.servers.values():
            places.setdefault(server.index, []).append(server)
        return places
