"""Fixtures of all tests: a real Redis-protocol server, and the check that no process outlives the
tests. The operating system chooses ports: servers listen on port 0 and report their port."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

# Must precede the import of torch. Ranks are processes with one thread, and the processes that they
# are compared with must sum in the same order.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import psutil
import pytest
import redis
from shoal_common.redis import EmbeddedRedis

from tests.collection import IMPORTED, large_packages
from tests.durations import write_durations
from tests.ranks.processes import mpi_ranks, nursery, rank_pool, take_ranks  # noqa: F401 - fixtures
from tests.zygote.children import zygote  # noqa: F401 - a fixture


def heed_interrupts() -> None:
    """Makes processes that the tests start end on Ctrl-C (SIGINT), even if the tests run in the
    background of a shell.

    A shell without job control makes its background jobs (`make test &` in a script) ignore SIGINT.
    Their child processes inherit this, and Python then installs no handler, so a script that a test
    interrupts would continue.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


heed_interrupts()

# Hypothesis has a deadline of 200 ms for each example and another for generating them. On a busy
# machine, exceeding either is a matter of chance. The choice of examples is random only in
# "searching" (make chaos): its failures are fixed and become tests, and every run of make test
# tries the same examples.
_UNHURRIED = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("searching", _UNHURRIED)
hypothesis.settings.register_profile("repeatable", _UNHURRIED, derandomize=True)
hypothesis.settings.load_profile("repeatable")

_ALLOCATIONS_A_COLLECTION = 20_000
_THREADS_GRACE_S = 5.0
_GRACE_S = 30.0
_MARK = "SHOAL_PYTEST_RUN"


_exit_status = 0
_PINNED = "2.13."
"""The version of torch that tests run with, except in make test-torch. With it, nothing may be
refused because of its version."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skips a test if Shoal refuses an operation because torch is too old (make test-torch)."""
    try:
        return (yield)
    except Exception as error:
        refused = re.search(r"needs torch \d+\.\d+ or newer, but \S+ is installed", str(error))
        if refused is None or version("torch").startswith(_PINNED):
            raise
        pytest.skip(f"refused: {refused.group()}")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Disables garbage collection while tests are collected, and makes it rarer while they run.

    Thousands of tests and their imports, torch among them, are nearly two million permanent
    objects, and a collection over all of them takes a second. With Python's own threshold, tests
    that import large packages would spend half of their time in collections.
    """
    gc.disable()
    try:
        yield
    finally:
        session.config.stash[IMPORTED] = large_packages()
        gc.set_threshold(_ALLOCATIONS_A_COLLECTION)
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", type=Path, help="write where the time went to this file")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    file = config.getoption("durations_file")
    # each process of xdist has a summary of its own tests
    if file is not None and not hasattr(config, "workerinput"):
        write_durations(file, terminalreporter.stats.values())


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    global _exit_status
    _exit_status = int(exitstatus)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Names threads that a test left running and ends with the tests' own status. The interpreter
    would wait for these threads forever."""
    deadline = time.monotonic() + _THREADS_GRACE_S
    others = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [t.name for t in others if t.is_alive()]
    if stuck:
        print(f"threads were left running: {', '.join(stuck)}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_status)


@pytest.fixture(scope="session", autouse=True)
def leftover_processes() -> Iterator[None]:
    """Fails the run if a process started by a test is still running at the end. Processes that are
    ending get 30 s.

    Descendants are found by their parents. Orphans, whose parent has died, are found by an
    environment variable that all processes inherit.
    """
    mark = os.environ[_MARK] = uuid.uuid4().hex
    before = set(psutil.pids())
    yield
    ours = [
        process
        for process in _descendants_and_orphans(mark)
        if process.pid not in before and not _is_python_helper(process)
    ]
    _, alive = psutil.wait_procs(ours, timeout=_GRACE_S)
    if not alive:
        return
    described = [_described(process) for process in alive]
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_GRACE_S)
    pytest.fail("tests left processes behind: " + "; ".join(described), pytrace=False)


def _descendants_and_orphans(mark: str) -> list[psutil.Process]:
    found = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(_MARK) == mark:
                found[process.pid] = process
    return list(found.values())


@pytest.fixture(scope="module")
def existing_objects_kept() -> None:
    """Exempts all existing objects from garbage collection, so that a test which collects often
    visits only its own objects. Others, of packages that earlier tests have imported, may be a
    million."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fresh_session() -> Iterator[None]:
    """Ensures that this process has no session before and after the test."""
    # imports torch, which some tests do not need
    from shoal_worker.elastic.session.worker_process import set_session

    set_session(None)
    yield
    set_session(None)


@pytest.fixture(scope="session")
def _redis_server(leftover_processes: None) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_url(_redis_server: EmbeddedRedis) -> str:
    """redis:// URL of a real server that is empty when the test starts. Tests that stop or restart
    a server start their own."""
    with redis.Redis.from_url(_redis_server.url) as client:
        client.flushall()
        client.script_flush()
    return _redis_server.url


def _is_python_helper(process: psutil.Process) -> bool:
    """Returns whether the process is one of multiprocessing's trackers, which serve a whole
    interpreter and end with it."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return True
    return "multiprocessing.resource_tracker" in command or "multiprocessing.forkserver" in command


def _described(process: psutil.Process) -> str:
    try:
        return (
            f"pid {process.pid}: {' '.join(process.cmdline()) or process.name()} (started by "
            f"{process.ppid()}, tests are {os.getpid()})"
        )
    except psutil.Error:
        return f"pid {process.pid}"
