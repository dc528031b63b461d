"""Value that describes the result of a job."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a job."""

    job_id: str
    ok: bool
    """True if the job's script ran to completion, even if a stop request shortened it."""
    exit_status: int | None
    """Exit status of `shoal run` (docs/exit-status.md). None if the launcher was killed before it
    could record the status, or if the job was not submitted from this machine."""
    summary: str
    """Human-readable description of the failed workers and the reasons, or of why the job is not
    finished. May be empty."""
    ended: datetime | None
    """Time at which the job ended; None if unknown."""
