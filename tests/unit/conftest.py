"""Keeps unit tests of one process apart from each other."""

import sys
from collections.abc import Iterator

import pytest

from tests.one_core import one_core

_RANKS_ARE_THREADS = {"compression", "sharding", "torch_calls", "worker_strategies"}
_SESSIONS = "shoal_worker.elastic.session.worker_process"


@pytest.fixture(autouse=True)
def no_session_is_left() -> Iterator[None]:
    """Drops the session that a test has opened in this process, so that the next test may call
    `as_distributed`. Imports nothing, because many tests need no torch."""
    yield
    sessions = sys.modules.get(_SESSIONS)
    if sessions is not None and sessions.find_session() is not None:
        sessions.set_session(None)


@pytest.fixture(autouse=True)
def ranks_share_a_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keeps a test whose ranks are threads on one core."""
    if request.path.parent.name in _RANKS_ARE_THREADS:
        with one_core():
            yield
    else:
        yield
