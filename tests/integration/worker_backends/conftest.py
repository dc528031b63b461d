"""Ranks as real processes (tests/ranks) that run the tasks in rank_tasks.py."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks.processes import Rank

_TASKS = "tests.integration.worker_backends.rank_tasks"


class BackendRank:
    """A rank that runs tasks by their names in rank_tasks.py."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def start(self, task: str, **arguments: Any) -> None:
        self._rank.start(f"{_TASKS}:{task}", **arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rank, name)


@pytest.fixture
def ranks(take_ranks: Callable[[int], list[Rank]]) -> Callable[[int], list[BackendRank]]:
    """Starts the given number of ranks. Ranks that are idle at the end of a test serve the next
    one."""
    return lambda count: [BackendRank(rank) for rank in take_ranks(count)]


@pytest.fixture
def prefix() -> str:
    return f"shoal:{{test}}:{uuid.uuid4().hex}"
