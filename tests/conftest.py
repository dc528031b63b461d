"""What all tests share: a real Redis-protocol server, and the check that no process outlives the tests.

Ports come from the operating system: servers listen on port 0 and say which they got.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest
import redis
from shoal_common.redis import EmbeddedRedis

_GRACE_S = 5.0


@pytest.fixture(scope="session", autouse=True)
def leftover_processes() -> Iterator[None]:
    """Fails the run when a process that a test started is still there at its end. Processes already on their way out get 5 s."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    started = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    _, alive = psutil.wait_procs([process for process in started if not _is_python_helper(process)], timeout=_GRACE_S)
    if not alive:
        return
    described = [_described(process) for process in alive]
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=_GRACE_S)
    pytest.fail("tests left processes behind: " + "; ".join(described), pytrace=False)


@pytest.fixture(scope="session")
def _redis_server(leftover_processes: None) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_url(_redis_server: EmbeddedRedis) -> str:
    """redis:// URL of a real server that is empty when the test starts. Tests that stop or restart a server start their own."""
    with redis.Redis.from_url(_redis_server.url) as client:
        client.flushall()
        client.script_flush()
    return _redis_server.url


def _is_python_helper(process: psutil.Process) -> bool:
    """multiprocessing's trackers serve a whole interpreter and end with it."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return True
    return "multiprocessing.resource_tracker" in command or "multiprocessing.forkserver" in command


def _described(process: psutil.Process) -> str:
    try:
        return f"pid {process.pid}: {' '.join(process.cmdline()) or process.name()} (started by {process.ppid()}, tests are {os.getpid()})"
    except psutil.Error:
        return f"pid {process.pid}"
