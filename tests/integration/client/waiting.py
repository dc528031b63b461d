"""Conditions for which tests of the client wait."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from shoal.client import Client

from tests.zygote.children import eventually

WAIT: Final = timedelta(seconds=120)
"""The machine may be busy."""


def until_ranked(client: Client, job_id: str, ranks: int) -> None:
    """Waits until so many members have a rank, and have taken a step."""

    def are_there() -> bool:
        return (
            sum(member.rank is not None and member.step > 0 for member in client.members(job_id))
            == ranks
        )

    eventually(are_there, f"{ranks} ranks of {job_id}", within_s=WAIT.total_seconds())
