"""Tasks for ranks that are processes (tests/ranks): they sum buckets over Gloo with every
compressor, and lose a rank. Bytes are counted twice: those passed to the backend, and those that
the kernel received on this process's connections."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from shoal_common.errors import MembershipChanged
from shoal_worker.backends.gloo.backend import GlooBackend
from shoal_worker.compression import CompressedReduction, compressor_names, parse_compression
from shoal_worker.store.redis_store import RedisStore

SHAPES = [(256, 512), (512,), (512, 300), (300,)]
NUMEL = 256 * 512 + 512 + 512 * 300 + 300
STEPS = 2


class CountingBackend(GlooBackend):
    """Counts bytes in the same way as `GradientCompressor.wire_bytes`."""

    asked = 0.0

    def all_reduce(self, tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
        self.asked += 2 * (self.world_size - 1) * tensor.nbytes / self.world_size
        return super().all_reduce(tensor, *rest, **options)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, **options: Any) -> Any:
        self.asked += (self.world_size - 1) * tensor.nbytes
        return super().all_gather(output, tensor, **options)

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        self.asked += (self.world_size - 1) * tensor.nbytes / self.world_size
        return super().all_to_all(output, tensor, *rest, **options)


def received_bytes(port_of_redis: int) -> int:
    """Returns the bytes that the kernel has received on all TCP connections of this process, except
    those to Redis."""
    total, seen = 0, set()
    for path in Path("/proc/self/fd").iterdir():
        number = int(path.name)
        try:
            status = os.fstat(number)
        except OSError:
            continue  # the descriptor of the listing itself
        if not stat.S_ISSOCK(status.st_mode) or status.st_ino in seen:
            continue  # the group has two descriptors per connection
        seen.add(status.st_ino)
        connection = socket.socket(fileno=os.dup(number))
        with connection:
            if (
                connection.family not in (socket.AF_INET, socket.AF_INET6)
                or connection.type != socket.SOCK_STREAM
            ):
                continue
            try:
                peer = connection.getpeername()
            except OSError:
                continue  # a listening socket
            if peer[1] != port_of_redis:
                # tcpi_bytes_received, linux/tcp.h
                total += struct.unpack_from(
                    "Q", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 128
                )[0]
    return total


@contextmanager
def group(url: str, prefix: str, rank: int, world_size: int) -> Iterator[CountingBackend]:
    store = RedisStore(url, prefix, timeout=timedelta(seconds=60))
    backend = CountingBackend()
    store.barrier("up", world_size, timedelta(seconds=60))
    backend.initialize(rank=rank, world_size=world_size, store=store, timeout=timedelta(seconds=60))
    try:
        yield backend
    finally:
        backend.shutdown()
        store.close()


def gradient(rank: int, step: int, world_size: int) -> torch.Tensor:
    return (
        torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000 * step + rank)) / world_size
    )


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def summed(name: str, backend: CountingBackend, port_of_redis: int) -> dict[str, Any]:
    """Sums two buckets per step, both in flight at the same time; returns results, errors and
    bytes."""
    compressor = parse_compression(
        {"name": name, "ratio": 0.02} if name in ("topk", "randomk") else name
    )
    assert compressor is not None
    reduction = CompressedReduction(compressor)
    results, errors = [], []
    backend.barrier()
    asked, received = backend.asked, received_bytes(port_of_redis)
    backend.barrier()  # no rank sends before all have read their counters
    for step in range(STEPS):
        started = [
            reduction.start(
                gradient(backend.rank, step, backend.world_size) * (index + 1),
                backend,
                index=index,
                step=step,
                shapes=SHAPES,
            )
            for index in range(2)
        ]
        for one in started:
            one.advance()
        buckets = [one.wait() for one in started]
        reduction.commit()
        results += [digest(bucket) for bucket in buckets]
        exact = sum(gradient(rank, step, backend.world_size) for rank in range(backend.world_size))
        errors.append(float((buckets[0] - exact).norm() / exact.norm()))
    backend.barrier()
    return {
        "results": results,
        "errors": errors,
        "asked": backend.asked - asked,
        "received": received_bytes(port_of_redis) - received,
        "expected": 2 * STEPS * compressor.wire_bytes(NUMEL, backend.world_size, SHAPES),
    }


def shrink(rank: int, world_size: int, url: str, prefix: str) -> dict[str, Any]:
    """A task: the last rank dies in its second step; the others roll back, form a new group and
    redo the step."""
    compressor = parse_compression("sign")
    assert compressor is not None
    reduction = CompressedReduction(compressor)
    with group(url, f"{prefix}:before", rank, world_size) as backend:
        reduction.start(gradient(rank, 0, world_size), backend, index=0, step=0).wait()
        reduction.commit()
        owed = digest(reduction.state_dict()["0/residual"])
        if rank == world_size - 1:
            os._exit(0)
        try:
            reduction.start(gradient(rank, 1, world_size), backend, index=0, step=1).wait()
            failed = ""
        except MembershipChanged as error:
            failed = str(error)
    reduction.rollback()
    kept = digest(reduction.state_dict()["0/residual"]) == owed
    with group(url, f"{prefix}:after", rank, world_size - 1) as backend:
        result = reduction.start(gradient(rank, 1, world_size), backend, index=0, step=1).wait()
        reduction.commit()
    return {"failed": failed, "kept": kept, "result": digest(result)}


def sums(rank: int, world_size: int, url: str, prefix: str) -> dict[str, Any]:
    """A task: returns the results of every compressor."""
    port_of_redis = int(url.rpartition(":")[2].partition("/")[0])
    with group(url, prefix, rank, world_size) as backend:
        return {name: summed(name, backend, port_of_redis) for name in compressor_names()}
