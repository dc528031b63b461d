"""Result of a job. A plain value; nothing here sends requests."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a job."""

    job_id: str
    ok: bool
    """True if it is finished: its script finished, possibly after a request to stop."""
    exit_status: int | None
    """Exit status of `shoal run` (docs/exit-status.md). None: its launcher was killed before it
    could record it, or the job was not submitted from this machine, so that its launcher is unknown
    here."""
    summary: str
    """Failed workers and the causes, for people, or why it is not finished. May be empty."""
    ended: datetime | None
    """None if unknown."""
