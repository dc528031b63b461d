"""A separate store for each test, on the real server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta

import pytest
from shoal_worker.store.redis_store import RedisStore


@pytest.fixture
def store(redis_url: str) -> Iterator[RedisStore]:
    """A store whose waits last 10 s at most, so that a longer wait fails the test."""
    opened = RedisStore(
        redis_url, f"shoal:{{test}}:{uuid.uuid4().hex}", timeout=timedelta(seconds=10)
    )
    yield opened
    opened.close()
