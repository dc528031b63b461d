"""The process of one rank, and what it can be told to do. Started by the fixture `ranks`; speaks JSON lines over a Unix socket.

The process that is started imports everything and forks one rank for each connection. It has no threads and no channels to fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import shoal_worker.backends.torch_backend  # noqa: F401 - registers shoal_gloo
import torch
import torch.distributed as dist
from shoal_common.errors import MembershipChanged, ShoalError
from shoal_worker.backends import ReduceOp
from shoal_worker.backends.gloo import GlooBackend
from shoal_worker.store import RedisStore
from torch.distributed.tensor import DTensor

_connection: socket.socket


def say(**message: Any) -> None:
    _connection.sendall((json.dumps(message) + "\n").encode())


@contextlib.contextmanager
def group(
    url: str, prefix: str, rank: int, world_size: int, *, timeout_s: float = 60.0, connect_timeout_s: float = 5.0
) -> Iterator[GlooBackend]:
    """A formed group. Waits first for all processes to be up."""
    store = RedisStore(url, prefix, timeout=timedelta(seconds=10))
    backend = GlooBackend()
    store.barrier("up", world_size, timedelta(seconds=30))
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


# --- collectives against numpy


def collectives(url: str, prefix: str, rank: int, world_size: int) -> None:
    """Every collective, with inputs that all ranks can compute, against numpy."""
    with group(url, prefix, rank, world_size) as backend:
        for dtype in (torch.float32, torch.float64, torch.int64):
            _check_collectives(backend, dtype)
        _check_point_to_point(backend)
        assert backend.is_initialized


def _check_collectives(backend: GlooBackend, dtype: torch.dtype) -> None:
    size, rank = backend.world_size, backend.rank
    everybodys = [np.random.default_rng(source).integers(1, 5, size=(2 * size, 3)) for source in range(size)]
    stacked = np.stack(everybodys)

    def mine() -> torch.Tensor:
        return torch.tensor(everybodys[rank], dtype=dtype)

    reductions = {
        ReduceOp.SUM: stacked.sum(0),
        ReduceOp.PRODUCT: stacked.prod(0),
        ReduceOp.MIN: stacked.min(0),
        ReduceOp.MAX: stacked.max(0),
    }
    if dtype.is_floating_point:
        reductions[ReduceOp.AVERAGE] = stacked.mean(0)
    for op, expected in reductions.items():
        reduced = mine()
        backend.all_reduce(reduced, op)
        np.testing.assert_allclose(reduced.numpy(), expected, rtol=1e-6)
        part = torch.empty(2, 3, dtype=dtype)
        handle = backend.reduce_scatter(part, mine(), op, async_op=True)
        handle.wait()
        handle.wait()
        assert handle.is_completed()
        np.testing.assert_allclose(part.numpy(), expected[2 * rank : 2 * rank + 2], rtol=1e-6)

    gathered = torch.empty(size, 2 * size, 3, dtype=dtype)
    backend.all_gather(gathered, mine())
    np.testing.assert_array_equal(gathered.numpy(), stacked)

    for source in range(size):
        copied = mine()
        backend.broadcast(copied, source)
        np.testing.assert_array_equal(copied.numpy(), everybodys[source])
        part = torch.empty(2, 3, dtype=dtype)
        backend.scatter(part, mine() if rank == source else None, source)
        np.testing.assert_array_equal(part.numpy(), everybodys[source][2 * rank : 2 * rank + 2])

    swapped = torch.empty(2 * size, 3, dtype=dtype)
    backend.all_to_all(swapped, mine())
    np.testing.assert_array_equal(swapped.numpy(), np.concatenate([one[2 * rank : 2 * rank + 2] for one in everybodys]))

    # Rank r sends r + 1 rows to everybody.
    sent = torch.full((size * (rank + 1), 3), rank, dtype=dtype)
    received = torch.empty(sum(source + 1 for source in range(size)), 3, dtype=dtype)
    backend.all_to_all(received, sent, [source + 1 for source in range(size)], [rank + 1] * size)
    np.testing.assert_array_equal(received[:, 0].numpy(), [source for source in range(size) for _ in range(source + 1)])
    backend.barrier()


def _check_point_to_point(backend: GlooBackend) -> None:
    """A ring, out of order: tags tell messages apart."""
    size, rank = backend.world_size, backend.rank
    following, before = (rank + 1) % size, (rank - 1) % size
    handles = [backend.send(torch.full((4,), 10.0 * rank + tag), following, tag, async_op=True) for tag in (1, 2)]
    second, first = torch.empty(4), torch.empty(4)
    backend.recv(second, before, 2)
    backend.recv(first, before, 1)
    for handle in handles:
        handle.wait()
    assert first.tolist() == [10.0 * before + 1] * 4
    assert second.tolist() == [10.0 * before + 2] * 4


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

    Says `formed` first, and `reducing` once a first collective went well. With `abort_when_told` a thread waits for the key `abort`.
    """
    signals = RedisStore(url, prefix + ":signals", timeout=timedelta(seconds=20))
    with group(url, prefix, rank, world_size) as backend:
        backend.all_reduce(torch.ones(1))
        aborter = threading.Thread(target=_abort_when_told, args=(signals, backend))
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


def _abort_when_told(signals: RedisStore, backend: GlooBackend) -> None:
    signals.get("abort")
    backend.abort("told to abort")
    signals.set("aborted", repr(time.time()))


def be_reducing(url: str, prefix: str, rank: int, world_size: int, fork: bool = False) -> str:
    """Reduces until the group fails, or it is killed. With `fork`, a forked child outlives it, as a DataLoader's worker would."""
    with group(url, prefix, rank, world_size) as backend:
        backend.all_reduce(torch.ones(1))
        child = _idle_child() if fork else None
        say(event="reducing", child=child)
        return _reduce_until_failure(backend)


def _idle_child() -> int:
    """A forked child that holds everything this process held, and does nothing, until it is killed."""
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(3600)
    return child


def die_while_connecting(url: str, prefix: str, rank: int, world_size: int) -> None:
    """Is killed after it told its peers where it listens, and before it connects to anybody."""

    class Deadly(RedisStore):
        def set(self, key: str, value: str | bytes) -> None:
            super().set(key, value)
            if key.startswith("gloo/"):
                os.kill(os.getpid(), 9)

    GlooBackend().initialize(rank=rank, world_size=world_size, store=Deadly(url, prefix))


def try_to_connect(url: str, prefix: str, rank: int, world_size: int, connect_timeout_s: float) -> dict[str, Any]:
    """Connects, in vain; with what error and after how long."""
    started = time.perf_counter()
    try:
        backend = GlooBackend()
        store = RedisStore(url, prefix)
        backend.initialize(rank=rank, world_size=world_size, store=store, connect_timeout=timedelta(seconds=connect_timeout_s))
        backend.all_reduce(torch.ones(1))  # its system may have taken the connection before the peer died
        return {"error": None}
    except ShoalError as error:
        return {"error": type(error).__name__, "message": str(error), "after_s": time.perf_counter() - started}


def cycle(url: str, prefix: str, rank: int, world_size: int, cycles: int) -> dict[str, Any]:
    """Groups made and aborted in the middle of a collective, again and again; what is open and running before and after."""
    before = _usage()
    base = RedisStore(url, prefix, timeout=timedelta(seconds=30))
    for number in range(cycles):
        base.barrier(f"start {number}", world_size)
        backend = GlooBackend()
        backend.initialize(rank=rank, world_size=world_size, store=base.with_prefix(f"{prefix}:{number}"), timeout=timedelta(seconds=20))
        backend.all_reduce(torch.ones(1))
        if rank == number % world_size:
            backend.abort("this cycle is over")
        with contextlib.suppress(MembershipChanged):
            backend.all_reduce(torch.ones(1 << 16))
        backend.shutdown()
    base.close()
    deadline = time.monotonic() + 5
    while any(after > most for after, most in zip(_usage().values(), before.values(), strict=True)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return {"before": before, "after": _usage()}


def leave_in_order(url: str, prefix: str, rank: int, world_size: int, cycles: int) -> None:
    """Groups that all ranks leave as soon as they have the last collective's result: that must disturb nobody who is still at it."""
    base = RedisStore(url, prefix, timeout=timedelta(seconds=30))
    base.barrier("up", world_size)
    for number in range(cycles):
        backend = GlooBackend()
        backend.initialize(rank=rank, world_size=world_size, store=base.with_prefix(f"{prefix}:{number}"), timeout=timedelta(seconds=20))
        total = torch.ones(1 << 18)
        backend.all_reduce(total)
        backend.shutdown()
        assert total[-1] == world_size
    base.close()


def _usage() -> dict[str, int]:
    return {"descriptors": len(list(Path("/proc/self/fd").iterdir())), "threads": len(list(Path("/proc/self/task").iterdir()))}


# --- under torch's own parallel code


def train_with_ddp(init_method: str, rank: int, world_size: int) -> list[float]:
    """torch's DDP on the backend shoal_gloo; the parameters after three steps."""
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("shoal_gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
    try:
        torch.manual_seed(rank)
        model = DistributedDataParallel(torch.nn.Linear(4, 2))
        return _train(model, model.module, rank, world_size)
    finally:
        dist.destroy_process_group()


def train_alone(world_size: int) -> list[float]:
    """The same on the whole batch in this one process."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    return _train(model, model, None, world_size)


def _train(model: torch.nn.Module, inner: torch.nn.Module, rank: int | None, world_size: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = torch.Generator().manual_seed(7)
    for _ in range(3):
        inputs = torch.randn(4 * world_size, 4, generator=batches)
        share = inputs if rank is None else inputs[4 * rank : 4 * rank + 4]
        optimizer.zero_grad()
        model(share).square().mean().backward()
        optimizer.step()
    whole = [parameter.full_tensor() if isinstance(parameter, DTensor) else parameter for parameter in inner.parameters()]
    return [value for parameter in whole for value in parameter.flatten().tolist()]


def shard_with_fsdp(init_method: str, rank: int, world_size: int) -> list[float]:
    """torch's FSDP2 on the backend shoal_gloo; the whole parameters after three steps."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("shoal_gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        fully_shard(model, mesh=mesh)
        return _train(model, model, rank, world_size)
    finally:
        dist.destroy_process_group()


def abort_torch_group(url: str, init_method: str, rank: int, world_size: int) -> str:
    """torch's default group: aborted from a thread while all wait for a rank that never comes."""
    dist.init_process_group("shoal_gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
    try:
        dist.all_reduce(torch.ones(1))
        if rank == world_size - 1:
            say(event="idle")
            RedisStore(url, init_method, timeout=timedelta(seconds=20)).get("over")
            return "idle"
        threading.Timer(0.1, dist.group.WORLD.abort).start()
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            return str(error)
        return "nothing was raised"
    finally:
        dist.destroy_process_group()


# --- the process


def serve(path: str) -> None:
    """Forks a rank for each connection, until it is killed."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    with socket.socket(socket.AF_UNIX) as nursery:
        nursery.bind(path)
        nursery.listen()
        os.write(1, b"ready\n")
        while True:
            connection, _ = nursery.accept()
            with connection:
                if os.fork() == 0:
                    nursery.close()
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the nursery
                    run_tasks(connection)
                    os._exit(0)


def run_tasks(connection: socket.socket) -> None:
    """Runs tasks until the other side hangs up."""
    global _connection
    _connection = connection
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    say(event="born", pid=os.getpid())
    with connection.makefile() as commands:
        for line in commands:
            command = json.loads(line)
            try:
                say(result=globals()[command["task"]](**command["arguments"]))
            except Exception:
                say(error=traceback.format_exc())


if __name__ == "__main__":
    serve(sys.argv[1])
