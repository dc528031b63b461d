"""Membership changes of a run, extracted from its coordinator's events. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

_SIGNAL: Final = "its process ended with signal "
_LEAVES: Final = ("drained",)
"""Reasons with which members leave while the run continues."""
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
    """Cause of a pause: a change of membership, an event of a parameter server, or a stalled
    step."""

    generation: int
    """Number of the new generation; 0 if there is no new one."""
    world_size: int = 0
    """Number of ranks in the new generation."""
    faults: tuple[str, ...] = ()
    """Lost members and the causes, one line each."""
    joins: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    stood: str = ""
    """Cause of a stalled step without a membership change; empty otherwise."""

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
    """Membership changes of one run. Must receive all events of the job in order."""

    run: int = 0
    """Number of the run whose events count; 0: all runs."""
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
    """Newest reported generation."""
    interrupted: frozenset[str] = frozenset()
    """Ids of this launcher's members at the time when a signal ended its run. They leave because of
    the signal, so their leaving is no event of the run."""

    _lost: list[str] = field(default_factory=list)
    _left: list[str] = field(default_factory=list)
    _has_begun: bool = False
    _is_over: bool = False

    def take(self, events: Iterable[JobEvent], endings: Mapping[str, str]) -> list[Change]:
        """Processes events of the job in order, and returns the changes that they contain.
        `endings`: member id -> how the process of one of this launcher's workers ended."""
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
                self._lost.append(f"{attributes.get('who') or f'member {event.member_id}'} {how}")
                self.faults += 1
            case "member_quarantined" if attributes.get("rank"):
                self._lost.append(
                    f"{attributes.get('who') or f'member {event.member_id}'} was kept out: "
                    f"{attributes.get('reason', '')}"
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
                self._lost, self._left, self._has_begun, self._is_over = [], [], False, False
            case "job_finished" | "stop_requested" | "job_failed":
                self._is_over = True

    def _formed(self, event: JobEvent) -> None:
        joins = tuple(filter(None, event.attributes.get("joined", "").split(", ")))
        if self._has_begun and (joins or self._lost or self._left or not self.interrupted):
            self.leaves += len(self._left)  # where all leave, there is no generation after them
            more = _MORE.search(event.attributes.get("joined", ""))
            self.joins += len(joins) + (int(more[1]) if more else 0)
            self.found.append(
                Change(
                    generation=event.generation,
                    world_size=int(event.attributes.get("world_size", "0")),
                    faults=tuple(self._lost),
                    joins=joins,
                    leaves=tuple(self._left),
                )
            )
        self._has_begun, self.generation = True, event.generation
        self._lost, self._left = [], []


def _how(detail: str) -> str:
    """Describes a member's end as the rest of a sentence, e.g. "was lost"."""
    number = detail.removeprefix(_SIGNAL)
    if number != detail and number.isdigit():
        try:
            return f"ended with {signal.Signals(int(number)).name}"
        except ValueError:
            return f"ended with signal {number}"
    return f"was lost: {detail}" if detail else "was lost"
