"""Ranks as threads of the test, with a pipeline group each, and data groups across replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from shoal_worker.backends.inmemory import InMemoryBackend

_TIMEOUT = timedelta(seconds=10)
_PATIENCE_S = 30.0


class Failed(Exception):
    """Some ranks raised: `errors` by rank."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        super().__init__("; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in sorted(errors.items())))
        self.errors = errors


def run_grid(pipeline: int, data: int, body: Callable[[int, int, Any, Any], Any]) -> list[list[Any]]:
    """`body(stage rank, replica, pipeline group, data group or None)` on each rank; results by replica and stage rank."""
    lines = [dist.HashStore() for _ in range(data)]
    columns = [dist.HashStore() for _ in range(pipeline)]
    results: list[list[Any]] = [[None] * pipeline for _ in range(data)]
    errors: dict[int, BaseException] = {}

    def run(rank: int, replica: int) -> None:
        backends = [InMemoryBackend(), InMemoryBackend()]
        try:
            backends[0].initialize(rank=rank, world_size=pipeline, store=lines[replica], timeout=_TIMEOUT)
            if data > 1:
                backends[1].initialize(rank=replica, world_size=data, store=columns[rank], timeout=_TIMEOUT)
            other = backends[1].process_group if data > 1 else None
            results[replica][rank] = body(rank, replica, backends[0].process_group, other)
        except BaseException as error:
            errors[replica * pipeline + rank] = error
        finally:
            for backend in backends:
                backend.shutdown()

    threads = [threading.Thread(target=run, args=(rank, replica), daemon=True) for replica in range(data) for rank in range(pipeline)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    if errors:
        raise Failed(errors)
    return results


def run_line(ranks: int, body: Callable[[int, Any], Any]) -> list[Any]:
    """`body(rank, group)` on each rank of one pipeline; results by rank."""
    return run_grid(ranks, 1, lambda rank, _, group, __: body(rank, group))[0]
