"""A worker without progress is excused if its training thread waits for a parameter server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from shoal_common.errors import UnavailableError
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_worker.parameter_servers.coordination.job import Job
from shoal_worker.parameter_servers.coordination.server_waits import ServerWaits
from shoal_worker.sparse_tables.row_reader import RowReader


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


@contextlib.contextmanager
def waiting_elsewhere(waits: ServerWaits, server: str) -> Iterator[None]:
    """Lets a background thread wait for the server while the context is open."""
    waiting, over = threading.Event(), threading.Event()

    def wait() -> None:
        with waits.of(server):
            waiting.set()
            assert over.wait(60)

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(60)
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_the_training_threads_wait_is_reported_with_its_server() -> None:
    clock = Clock()
    waits = ServerWaits(clock)
    with waits.of("server 0"):
        clock.s += 5
        assert waits.now == (5.0, "server 0")
    assert waits.now == (0.0, "")


def test_a_wait_of_another_thread_is_not_reported() -> None:
    clock = Clock()
    waits = ServerWaits(clock)
    with waiting_elsewhere(waits, "server 0"):
        clock.s += 5
        assert waits.now == (0.0, "")


def test_wait_of_another_thread_counts_once_the_training_thread_waits_for_it() -> None:
    clock = Clock()
    waits = ServerWaits(clock)
    with waiting_elsewhere(waits, "server 0"):
        clock.s += 30
        with waits.collects():
            clock.s += 5
            assert waits.now == (5.0, "server 0")
        assert waits.now == (0.0, "")


def test_collecting_background_thread_reports_nothing() -> None:
    waits, clock = ServerWaits(Clock()), Clock()
    waits._clock = clock
    seen: list[tuple[float, str]] = []

    def collect() -> None:
        with waits.collects(), waits.of("server 0"):
            clock.s += 5
            seen.append(waits.now)

    thread = threading.Thread(target=collect)
    thread.start()
    thread.join()
    assert seen == [(0.0, "")]


@pytest.mark.parametrize("awaited", [False, True])
def test_prefetched_rows_count_as_a_wait_only_once_the_training_thread_needs_them(
    awaited: bool,
) -> None:
    asked, over = threading.Event(), threading.Event()

    def shard_map() -> None:
        asked.set()
        assert over.wait(60)

    waits = ServerWaits()
    job = cast(Job, SimpleNamespace(leaving=False, shard_map=shard_map, waits=waits))
    reader = RowReader(job, pb.ShardMap(), patience=timedelta(seconds=60))
    calls = iter([UnavailableError("the server is away"), None])

    def attempt() -> None:
        if (error := next(calls)) is not None:
            raise error

    done: Future[Any] = Future()

    def read_ahead() -> None:
        done.set_result(reader.retry_until(attempt))

    thread = threading.Thread(target=read_ahead)
    thread.start()
    try:
        assert asked.wait(60)
        if not awaited:
            assert waits.now == (0.0, "")
            return
        servers: list[str] = []

        def watch() -> None:
            servers.append(_first_reported(waits))
            over.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        reader.await_ahead(done)
        watcher.join()
        assert servers == ["parameter servers of sparse tables"]
    finally:
        over.set()
        thread.join()
        reader.close()


def _first_reported(waits: ServerWaits) -> str:
    """Returns the first server that is reported within ten seconds."""
    for _ in range(10_000):
        if (server := waits.now[1]) != "":
            return server
        threading.Event().wait(0.001)
    return ""
