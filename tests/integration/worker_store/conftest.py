"""A store of its own for each test, over the real server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta

import pytest
from shoal_worker.store.redis_store import RedisStore


@pytest.fixture
def store(redis_url: str) -> Iterator[RedisStore]:
    """Waits at most 10 s; every test that waits longer has failed."""
    opened = RedisStore(
        redis_url, f"shoal:{{test}}:{uuid.uuid4().hex}", timeout=timedelta(seconds=10)
    )
    yield opened
    opened.close()
