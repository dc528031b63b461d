"""Something that happened in a job. A plain value; nothing here asks anybody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True)
class Event:
    """One entry of a job's log of events, which the coordinator keeps."""

    event_id: str
    """Grows; `Client.events(after=...)` goes on behind it."""
    at: datetime
    kind: str
    """job_created, member_joined, member_lost, generation_formed, server_lost, ..."""
    generation: int
    """The newest one at that moment; 0: there was none."""
    member_id: str | None
    """The member that it is about; None: it is about none."""
    attributes: Mapping[str, str]
    """What else is to say, by name."""
