"""Conditions that tests of the client wait for."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from shoal.client import Client

from tests.zygote.children import eventually

WAIT: Final = timedelta(seconds=120)
"""Deadline, long enough for a busy machine."""


def until_ranked(client: Client, job_id: str, ranks: int) -> None:
    """Waits until the given number of members have a rank and have taken a step."""

    def are_there() -> bool:
        return (
            sum(member.rank is not None and member.step > 0 for member in client.members(job_id))
            == ranks
        )

    eventually(are_there, f"{ranks} ranks of {job_id}", within_s=WAIT.total_seconds())
