"""How a job ended. A plain value; nothing here asks anybody."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True)
class Result:
    """The end of a job."""

    job_id: str
    ok: bool
    """It is finished: its script came to its end, or it was stopped and did."""
    exit_status: int | None
    """That of `shoal run` (docs/exit-status.md). None: its launcher was killed before it could say;
    or the job was not submitted from this machine, so that no launcher of it is known here."""
    summary: str
    """For people: which workers failed and why, or why it is not finished. May be empty."""
    ended: datetime | None
    """None: not known."""
