"""Ranks as threads of the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

_PATIENCE_S = 60.0

Bodies = Sequence[Callable[[], Any]]


def run_threads(bodies: Bodies, *, when_one_fails: Callable[[], None] = lambda: None) -> list[Any]:
    """Runs each body on a thread of its own and returns the results in order. Raises the error of
    the first body that failed.

    `when_one_fails` is called after each failure, to free the threads that wait for the failed one.
    """
    failures, futures = _run(bodies, when_one_fails)
    if failures:
        raise failures[0]
    return [future.result() for future in futures]


def errors_of_threads(bodies: Bodies) -> dict[int, BaseException]:
    """Runs bodies that are expected to fail. Returns the error of each one that failed."""
    _, futures = _run(bodies, lambda: None)
    return {
        rank: error
        for rank, future in enumerate(futures)
        if (error := future.exception()) is not None
    }


def _run(
    bodies: Bodies, when_one_fails: Callable[[], None]
) -> tuple[list[BaseException], list[Future[Any]]]:
    failures: list[BaseException] = []

    def ended(future: Future[Any]) -> None:
        if (error := future.exception()) is not None:
            failures.append(error)
            when_one_fails()

    pool = ThreadPoolExecutor(len(bodies), thread_name_prefix="rank")
    futures = [pool.submit(body) for body in bodies]
    for future in futures:
        future.add_done_callback(ended)
    _, hanging = wait(futures, _PATIENCE_S)
    pool.shutdown(wait=not hanging)
    assert not hanging, (
        f"ranks {[rank for rank, future in enumerate(futures) if future in hanging]} hang"
    )
    return failures, futures
