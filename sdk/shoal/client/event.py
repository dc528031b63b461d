"""Value that describes an event of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True)
class Event:
    """An entry of a job's event log, which is kept by the coordinator."""

    event_id: str
    """Id of the event. Ids increase within a job; `Client.events(after=...)` returns the events
    after a given id."""
    at: datetime
    kind: str
    """Kind of event, such as job_created, member_joined, member_lost, generation_formed or
    server_lost."""
    generation: int
    """Newest generation at the time of the event; 0 if there was none."""
    member_id: str | None
    """Id of the member that the event is about; None if it is not about a member."""
    attributes: Mapping[str, str]
    """Additional details: name -> value."""
