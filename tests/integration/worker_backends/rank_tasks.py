"""Tasks for the processes of the fixture `ranks`."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import shoal_worker.backends.gloo.backend  # noqa: F401 - registers shoal_gloo
import torch
import torch.distributed as dist
from shoal_common.errors import MembershipChanged, ShoalError
from shoal_worker.backends import ReduceOp
from shoal_worker.backends.gloo.backend import GlooBackend
from shoal_worker.store.redis_store import RedisStore

from tests.integration.worker_backends.conformance import check_backend, failures
from tests.ranks.tasks import say

_PATIENCE = timedelta(seconds=60)


def _rendezvous(store: RedisStore, name: str, world_size: int) -> None:
    """Waits until all ranks have called it. (A store has `barrier` from torch 2.12 on.)"""
    if store.add(f"{name}/came", 1) == world_size:
        store.set(f"{name}/all", "1")
    store.wait([f"{name}/all"], _PATIENCE)


@contextlib.contextmanager
def group(
    url: str,
    prefix: str,
    rank: int,
    world_size: int,
    *,
    timeout_s: float = 300.0,
    connect_timeout_s: float = 60.0,
) -> Iterator[GlooBackend]:
    """Yields a group, once all processes are running."""
    store = RedisStore(url, prefix, timeout=_PATIENCE)
    backend = GlooBackend()
    _rendezvous(store, "up", world_size)
    backend.initialize(
        rank=rank,
        world_size=world_size,
        store=store,
        timeout=timedelta(seconds=timeout_s),
        connect_timeout=timedelta(seconds=connect_timeout_s),
    )
    try:
        yield backend
    finally:
        backend.shutdown()
        store.close()


# --- conformance


def conform_backend(url: str, prefix: str, rank: int, world_size: int) -> None:
    """Checks the collectives of GlooBackend."""
    with group(url, prefix, rank, world_size) as backend:
        check_backend(backend)


def conform_torch(init_method: str, rank: int, world_size: int) -> dict[str, str]:
    """Checks torch on the backend shoal_gloo; returns the failed checks and their errors."""
    dist.init_process_group(
        "shoal_gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=_PATIENCE
    )
    try:
        return failures()
    finally:
        dist.destroy_process_group()


# --- failures


def survive(
    url: str,
    prefix: str,
    rank: int,
    world_size: int,
    next_rank: int,
    next_world_size: int,
    abort_when_told: bool = False,
) -> dict[str, Any]:
    """Reduces until the group fails, then forms the next group and reduces there.

    Reports `formed` first, and `reducing` after the first collective. With `abort_when_told`, a
    thread aborts the group when the store has the key `abort`.
    """
    signals = RedisStore(url, prefix + ":signals", timeout=_PATIENCE)
    with group(url, prefix, rank, world_size) as backend:
        backend.all_reduce(torch.ones(1))
        aborter = threading.Thread(target=_abort_when_asked, args=(signals, backend))
        if abort_when_told:
            aborter.start()
        say(event="reducing")
        reason = _reduce_until_failure(backend)
        failed_at = time.time()
        if abort_when_told:
            aborter.join()
    started = time.perf_counter()
    with group(url, prefix + ":next", next_rank, next_world_size) as following:
        total = torch.ones(1)
        following.all_reduce(total)
        again_ms = (time.perf_counter() - started) * 1e3
        following.barrier()
    signals.close()
    return {"reason": reason, "failed_at": failed_at, "again_ms": again_ms, "total": total.item()}


def _reduce_until_failure(backend: GlooBackend) -> str:
    buffer = torch.ones(1 << 21)  # large, so that most failures come in the middle of a message
    while True:
        try:
            backend.all_reduce(buffer, ReduceOp.AVERAGE)
        except MembershipChanged as error:
            return str(error)


def _abort_when_asked(signals: RedisStore, backend: GlooBackend) -> None:
    signals.get("abort")
    backend.abort("told to abort")
    signals.set("aborted", repr(time.time()))


def be_reducing(url: str, prefix: str, rank: int, world_size: int, fork: bool = False) -> str:
    """Reduces until the group fails or the process is killed. With `fork`, a forked child outlives
    the process, as a DataLoader's worker would."""
    with group(url, prefix, rank, world_size) as backend:
        backend.all_reduce(torch.ones(1))
        child = _idle_child() if fork else None
        say(event="reducing", child=child)
        return _reduce_until_failure(backend)


def _idle_child() -> int:
    """Forks a child that inherits all descriptors of this process and idles until it is killed."""
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(3600)
    return child


def die_while_connecting(url: str, prefix: str, rank: int, world_size: int) -> None:
    """Dies after publishing its listening address and before connecting to any rank."""

    class Deadly(RedisStore):
        def set(self, key: str, value: str | bytes) -> None:
            super().set(key, value)
            if key.startswith("gloo/"):
                os.kill(os.getpid(), 9)

    GlooBackend().initialize(rank=rank, world_size=world_size, store=Deadly(url, prefix))


def try_to_connect(
    url: str, prefix: str, rank: int, world_size: int, connect_timeout_s: float
) -> dict[str, Any]:
    """Tries to connect; returns the error and the time until it was raised."""
    started = time.perf_counter()
    try:
        backend = GlooBackend()
        store = RedisStore(url, prefix)
        backend.initialize(
            rank=rank,
            world_size=world_size,
            store=store,
            connect_timeout=timedelta(seconds=connect_timeout_s),
        )
        # its system may have accepted the connection before the peer died
        backend.all_reduce(torch.ones(1))
        return {"error": None}
    except ShoalError as error:
        return {
            "error": type(error).__name__,
            "message": str(error),
            "after_s": time.perf_counter() - started,
        }


def cycle(url: str, prefix: str, rank: int, world_size: int, cycles: int) -> dict[str, Any]:
    """Makes groups and aborts each in the middle of a collective; returns the open descriptors and
    threads before and after."""
    before = _usage()
    base = RedisStore(url, prefix, timeout=_PATIENCE)
    for number in range(cycles):
        _rendezvous(base, f"start {number}", world_size)
        backend = GlooBackend()
        backend.initialize(
            rank=rank,
            world_size=world_size,
            store=base.with_prefix(f"{prefix}:{number}"),
            timeout=_PATIENCE,
            connect_timeout=_PATIENCE,
        )
        backend.all_reduce(torch.ones(1))
        if rank == number % world_size:
            backend.abort("this cycle is over")
        with contextlib.suppress(MembershipChanged):
            backend.all_reduce(torch.ones(1 << 16))
        backend.shutdown()
    base.close()
    deadline = time.monotonic() + 30
    while (
        any(after > most for after, most in zip(_usage().values(), before.values(), strict=True))
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    return {"before": before, "after": _usage()}


def leave_in_order(url: str, prefix: str, rank: int, world_size: int, cycles: int) -> None:
    """Makes groups that each rank leaves as soon as it has the last collective's result. That must
    not disturb ranks that are still in the collective."""
    base = RedisStore(url, prefix, timeout=_PATIENCE)
    _rendezvous(base, "up", world_size)
    for number in range(cycles):
        backend = GlooBackend()
        backend.initialize(
            rank=rank,
            world_size=world_size,
            store=base.with_prefix(f"{prefix}:{number}"),
            timeout=_PATIENCE,
            connect_timeout=_PATIENCE,
        )
        total = torch.ones(1 << 18)
        backend.all_reduce(total)
        backend.shutdown()
        assert total[-1] == world_size
    base.close()


def _usage() -> dict[str, int]:
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }


# --- under torch's names


def abort_torch_group(url: str, init_method: str, rank: int, world_size: int) -> str:
    """Aborts torch's default group from a thread, while all ranks wait for one that never comes."""
    dist.init_process_group(
        "shoal_gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=_PATIENCE
    )
    try:
        dist.all_reduce(torch.ones(1))
        if rank == world_size - 1:
            say(event="idle")
            RedisStore(url, init_method, timeout=_PATIENCE).get("over")
            return "idle"
        threading.Timer(0.1, dist.group.WORLD.abort).start()
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            return str(error)
        return "nothing was raised"
    finally:
        dist.destroy_process_group()
