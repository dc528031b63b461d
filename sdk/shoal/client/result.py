"""Result of a job: a plain value that sends no requests."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True)
class Result:
    """Outcome of a job."""

    job_id: str
    ok: bool
    """True if the job is finished: its script finished, possibly after a request to stop."""
    exit_status: int | None
    """Exit status of `shoal run` (docs/exit-status.md). None if the launcher was killed before it
    could record the status, or if the job was not submitted from this machine."""
    summary: str
    """Description for people of the failed workers and the causes, or of the reason why the job is
    not finished. May be empty."""
    ended: datetime | None
    """Time at which the job ended; None if unknown."""
