"""Ranks as threads of the test, with one pipeline group per replica and data groups across
replicas."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from shoal_worker.backends.inmemory.backend import InMemoryBackend

from tests.ranks.threads import errors_of_threads, run_threads

_TIMEOUT = timedelta(seconds=120)

Body = Callable[[int, int, Any, Any], Any]
"""Function of a rank. Arguments: stage rank, replica, pipeline group, and data group or None."""


def run_grid(pipeline: int, data: int, body: Body) -> list[list[Any]]:
    """Runs `body` on each rank; returns the results by replica and stage rank. Raises the error of
    the first rank that failed."""
    results = run_threads(_grid(pipeline, data, body))
    return [results[replica * pipeline :][:pipeline] for replica in range(data)]


def errors_of_grid(pipeline: int, data: int, body: Body) -> dict[int, BaseException]:
    """Returns the errors of the ranks that failed, by rank."""
    return errors_of_threads(_grid(pipeline, data, body))


def run_line(ranks: int, body: Callable[[int, Any], Any]) -> list[Any]:
    """Runs `body(rank, group)` on each rank of one pipeline; returns the results by rank."""
    return run_grid(ranks, 1, lambda rank, _, group, __: body(rank, group))[0]


def _grid(pipeline: int, data: int, body: Body) -> list[Callable[[], Any]]:
    lines = [dist.HashStore() for _ in range(data)]
    columns = [dist.HashStore() for _ in range(pipeline)]

    def run(replica: int, rank: int) -> Any:
        backends = [InMemoryBackend(), InMemoryBackend()]
        try:
            backends[0].initialize(
                rank=rank, world_size=pipeline, store=lines[replica], timeout=_TIMEOUT
            )
            if data > 1:
                backends[1].initialize(
                    rank=replica, world_size=data, store=columns[rank], timeout=_TIMEOUT
                )
            return body(
                rank,
                replica,
                backends[0].process_group,
                backends[1].process_group if data > 1 else None,
            )
        finally:
            for backend in backends:
                backend.shutdown()

    return [partial(run, replica, rank) for replica in range(data) for rank in range(pipeline)]
