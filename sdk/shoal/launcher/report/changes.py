"""Extracts the membership changes of a run from its coordinator's events. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

_PROCESS: Final = "its process ended with "
_LEAVES: Final = ("drained",)
"""Reasons for members to leave while the run continues."""
_MORE: Final = re.compile(r" and (\d+) more$")


class JobEvent(Protocol):
    """Event of a job, with the fields of `shoal.v1.Event`."""

    event_id: str
    run: int
    kind: str
    generation: int
    member_id: str

    @property
    def attributes(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, kw_only=True)
class Change:
    """Possible cause of a pause: a membership change, an event of a parameter server, or a stalled
    step."""

    generation: int
    """Number of the generation after the change; 0 if there is none."""
    world_size: int = 0
    """Number of ranks in the new generation."""
    faults: tuple[str, ...] = ()
    """Lost members with the cause of each loss, one line each."""
    joins: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    stood: str = ""
    """Cause of a stalled step that did not change the membership; empty otherwise."""

    @property
    def text(self) -> str:
        """Description of the change in one line, without a line break."""
        if self.stood:
            return self.stood
        parts = [
            *self.faults,
            *(f"{who} joined" for who in self.joins),
            *(f"{who} left" for who in self.leaves),
        ]
        return "; ".join(parts) or f"the ranks changed (generation {self.generation})"


@dataclass(kw_only=True)
class Changes:
    """Counts and collects the membership changes of one run. It must receive all events of the job
    in order."""

    run: int = 0
    """Number of the run whose events are processed; 0: all runs."""
    newest_event: str = ""
    """Id of the last event that was processed."""
    found: list[Change] = field(default_factory=list)
    faults: int = 0
    """Number of lost ranks and parameter servers."""
    joins: int = 0
    """Number of ranks that joined after the start of the run."""
    leaves: int = 0
    """Number of ranks that left on request while the run continued."""
    generation: int = 0
    """Newest generation that has been reported."""
    interrupted: frozenset[str] = frozenset()
    """Ids of this launcher's members at the time when a signal ended its run. Their departures are
    a consequence of the signal and are not counted."""

    _lost: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Lost members since the last generation, by id: name and cause."""
    _left: list[str] = field(default_factory=list)
    _has_begun: bool = False
    _is_over: bool = False

    def take(self, events: Iterable[JobEvent], endings: Mapping[str, str]) -> list[Change]:
        """Processes events of the job in order, and returns the changes that they describe.
        `endings`: member id -> how the worker's process ended, for this launcher's workers."""
        before = len(self.found)
        for event in events:
            self.newest_event = event.event_id
            if not self.run or event.run == self.run:
                self._take(event, endings)
        return self.found[before:]

    def _take(self, event: JobEvent, endings: Mapping[str, str]) -> None:
        attributes = event.attributes
        match event.kind:
            case "member_lost" if attributes.get("rank"):
                how = endings.get(event.member_id) or _how(attributes.get("detail", ""))
                who = attributes.get("who") or f"member {event.member_id}"
                self._lost[event.member_id] = (who, how)
                self.faults += 1
            case "member_exited" if event.member_id in self._lost:
                how = endings.get(event.member_id) or _how(attributes.get("detail", ""))
                self._lost[event.member_id] = (self._lost[event.member_id][0], how)
            case "member_quarantined" if attributes.get("rank"):
                self._lost[event.member_id] = (
                    attributes.get("who") or f"member {event.member_id}",
                    f"was not admitted: {attributes.get('reason', '')}",
                )
                self.faults += 1
            case "step_stands" if not self._is_over:
                self.found.append(Change(generation=0, stood=attributes.get("reason", "")))
            case "member_left" if (
                attributes.get("rank")
                and attributes.get("ending") in _LEAVES
                and not self._is_over
                and event.member_id not in self.interrupted
            ):
                self._left.append(attributes.get("who") or f"member {event.member_id}")
            case "server_lost" if not self._is_over:
                self.faults += 1
                self.found.append(
                    Change(
                        generation=0,
                        faults=(f"parameter server {attributes.get('server_id', '')} was lost",),
                    )
                )
            case "generation_formed":
                self._formed(event)
            case "run_began" | "run_resumed":
                self._lost, self._left, self._has_begun, self._is_over = {}, [], False, False
            case "job_finished" | "stop_requested" | "job_failed":
                self._is_over = True

    def _formed(self, event: JobEvent) -> None:
        joins = tuple(filter(None, event.attributes.get("joined", "").split(", ")))
        if self._has_begun and (joins or self._lost or self._left or not self.interrupted):
            self.leaves += len(self._left)  # if all members leave, no generation follows
            more = _MORE.search(event.attributes.get("joined", ""))
            self.joins += len(joins) + (int(more[1]) if more else 0)
            self.found.append(
                Change(
                    generation=event.generation,
                    world_size=int(event.attributes.get("world_size", "0")),
                    faults=tuple(f"{who} {how}" for who, how in self._lost.values()),
                    joins=joins,
                    leaves=tuple(self._left),
                )
            )
        self._has_begun, self.generation = True, event.generation
        self._lost, self._left = {}, []


def _how(detail: str) -> str:
    """Returns the end of a sentence about a lost member, such as "was lost". `detail`: cause of the
    loss according to the coordinator."""
    if detail.startswith(_PROCESS):
        return detail.removeprefix("its process ")
    return f"was lost: {detail}" if detail else "was lost"
