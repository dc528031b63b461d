"""Event of a job: a plain value that sends no requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True)
class Event:
    """One entry of a job's event log, which the coordinator keeps."""

    event_id: str
    """Id of the event, increasing within a job; `Client.events(after=...)` continues after it."""
    at: datetime
    kind: str
    """Kind of event: job_created, member_joined, member_lost, generation_formed, server_lost,
    ..."""
    generation: int
    """Newest generation at that time; 0 if there was none."""
    member_id: str | None
    """Member concerned; None if there is none."""
    attributes: Mapping[str, str]
    """Further details by name."""
