"""Tasks of ranks whose group is reconfigured, through torch's own API if this torch has it,
otherwise through the methods that it would call."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import shoal_worker.backends.gloo.backend  # noqa: F401 - registers shoal_gloo
import torch
import torch.distributed as dist
from shoal_worker.backends.gloo.reconfigurable import ReconfigurableGroup
from shoal_worker.store.redis_store import RedisStore
from torch.distributed.distributed_c10d import GroupName, PrefixStore, Store

from tests.ranks.tasks import say

HAS_API = hasattr(dist, "_reconfigure")
_PATIENCE = timedelta(seconds=60)
_LARGE = 1 << 20


class Member:
    """A process that takes part in groups."""

    def __init__(self, store: Store, rank: int, timeout: timedelta, group: Any) -> None:
        self.rank, self.timeout, self.group = rank, timeout, group
        self.store = store
        """Store for handles and signals."""

    def handles(self, number: int, who: Sequence[int]) -> list[str]:
        """Publishes this process's handle and returns those of `who`, in that order."""
        self.store.set(f"handle/{number}/{self.rank}", self._handle())
        return [self.store.get(f"handle/{number}/{rank}").decode() for rank in who]

    def reconfigure(
        self, number: int, who: Sequence[int], *, timeout_s: float | None = None
    ) -> None:
        self.configure(number, self.handles(number, who), timeout_s=timeout_s)

    def configure(self, number: int, handles: Any, *, timeout_s: float | None = None) -> None:
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        if HAS_API:
            torchs: Any = dist
            work = torchs._reconfigure(uuid=number, handles=handles, timeout=timeout)
        else:
            work = self.group.reconfigure(
                SimpleNamespace(uuid=number, handles=handles, timeout=timeout, hints={})
            )
        assert work.wait()
        assert work.is_completed()

    def sum(self, tensor: torch.Tensor) -> Any:
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def found(self) -> list[float]:
        """Returns the rank, the world size, and the sum of rank + 1 over all ranks."""
        total = torch.full((4,), self.group.rank() + 1.0)
        self.sum(total).wait()
        return [self.group.rank(), self.group.size(), total[-1].item()]

    def _handle(self) -> str:
        handle: str = self.group.get_reconfigure_handle()
        if HAS_API:
            torchs: Any = dist
            assert torchs._get_reconfigure_handle() == handle
        return handle


@contextlib.contextmanager
def member(
    url: str, prefix: str, rank: int, world_size: int, *, timeout_s: float = 60.0
) -> Iterator[Member]:
    """Yields a process that is not in a group yet. `url`: redis://..., or tcp:PORT of a TCPStore on
    this machine."""
    timeout = timedelta(seconds=timeout_s)

    def connect() -> Any:
        if url.startswith("tcp:"):
            port = int(url.removeprefix("tcp:"))
            return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_PATIENCE)
        return RedisStore(url, prefix, timeout=_PATIENCE)

    for_signals, for_groups = connect(), connect()  # a PrefixStore holds only the C++ half
    signals = PrefixStore(f"{prefix}/signals", for_signals)
    groups = PrefixStore(f"{prefix}/groups", for_groups)
    if HAS_API:
        torchs: Any = dist
        torchs.init_process_group(
            "shoal_gloo",
            store=groups,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            enable_reconfigure=True,
        )
        assert torchs._supports_reconfigure()
        group: Any = dist.group.WORLD
    else:
        group = ReconfigurableGroup(groups, rank, world_size, GroupName("reconfigured"), timeout)
    try:
        yield Member(signals, rank, timeout, group)
    finally:
        if HAS_API:
            dist.destroy_process_group()
        else:
            group.shutdown()


def _failure(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def shrink_and_grow(url: str, prefix: str, rank: int) -> list[Any]:
    """Forms groups of three ranks, two without the middle one, three, one each, and three again."""
    with member(url, prefix, rank, 3) as me:
        found: list[Any] = [_failure(me.found)]
        me.reconfigure(1, [0, 1, 2])
        found.append(me.found())
        if rank != 1:
            me.reconfigure(2, [0, 2])
            found.append(me.found())
        me.reconfigure(3, [0, 1, 2])
        found.append(me.found())
        me.reconfigure(4 + rank, [rank])
        found.append(me.found())
        me.reconfigure(7, [2, 1, 0])
        found.append(me.found())
        return found


def reconfigure_twice(url: str, prefix: str, rank: int) -> list[Any]:
    """Forms a group of the same ranks twice without a collective in between, then with the ranks as
    a set."""
    with member(url, prefix, rank, 2) as me:
        me.reconfigure(1, [0, 1])
        me.reconfigure(2, [0, 1])
        found: list[Any] = [me.found()]
        me.configure(3, set(me.handles(3, [0, 1])))
        found.append(me.found())
        received = torch.zeros(_LARGE)
        peer = 1 - me.group.rank()
        works = [
            me.group.send([torch.full((_LARGE,), me.group.rank() + 1.0)], peer, 0),
            me.group.recv([received], peer, 0),
        ]
        for work in works:
            work.wait()
        found.append([me.group.rank(), received[-1].item()])
        return found


def leave_in_flight(url: str, prefix: str, rank: int) -> dict[str, Any]:
    """Ranks 0 and 1 leave collectives in flight that wait for the stopped rank 2, and reuse their
    tensors. Then rank 2 continues, and all form one group again."""
    with member(url, prefix, rank, 3) as me:
        me.reconfigure(1, [0, 1, 2])
        me.found()
        if rank == 2:
            say(event="to be stopped")
            me.store.get("continued")
            late = _failure(lambda: me.sum(torch.ones(_LARGE)).wait())
            me.store.set("late", "")
            me.reconfigure(3, [0, 1, 2])
            return {"late": late, "found": me.found()}
        me.store.get("stopped")
        tensors = [torch.ones(_LARGE) for _ in range(3)]
        works = [me.sum(tensor) for tensor in tensors]
        started = time.monotonic()
        me.reconfigure(2, [0, 1])
        for tensor in tensors:
            tensor.fill_(7.0)
        took_s = time.monotonic() - started
        found = me.found()
        say(event="reused")
        me.store.get("late")
        failures = [_failure(work.wait) for work in works]
        me.reconfigure(3, [0, 1, 2])
        return {
            "failures": failures,
            "took_s": took_s,
            "small": found,
            "found": me.found(),
            "changed": [int((tensor != 7.0).sum()) for tensor in tensors],
        }


def include_a_dead_rank(url: str, prefix: str, rank: int) -> dict[str, Any]:
    """Kills rank 2 during a sum. The other ranks try to form a group with it, and then
    without it."""
    with member(url, prefix, rank, 3) as me:
        me.reconfigure(1, [0, 1, 2])
        handles = me.handles(2, [0, 1, 2])
        me.found()
        say(event="summing")
        if rank == 2:
            me.store.get("never")
        started = time.monotonic()
        failure = _failure(lambda: me.sum(torch.ones(_LARGE)).wait())
        took_s = time.monotonic() - started
        refusal = _failure(lambda: me.configure(2, handles, timeout_s=1.0))
        between = _failure(me.found)
        me.configure(3, handles[:2])
        return {
            "failure": failure,
            "took_s": took_s,
            "refusal": refusal,
            "between": between,
            "found": me.found(),
        }


def exceed_the_timeout(url: str, prefix: str, rank: int) -> dict[str, Any]:
    """Rank 1 takes no part in a collective for longer than the timeout."""
    with member(url, prefix, rank, 2, timeout_s=2.0) as me:
        me.reconfigure(1, [0, 1], timeout_s=60.0)
        me.found()
        failure = ""
        if rank == 0:
            failure = _failure(lambda: me.sum(torch.ones(_LARGE)).wait())
            me.store.set("failed", "")
        me.store.get("failed")
        me.reconfigure(2, [0, 1], timeout_s=60.0)
        return {"failure": failure, "found": me.found()}


def abort_and_continue(url: str, prefix: str, rank: int) -> dict[str, Any]:
    """Rank 0 aborts a collective, and then a reconfigure for which rank 1 does not come."""
    with member(url, prefix, rank, 2) as me:
        me.reconfigure(1, [0, 1])
        me.found()
        handles = me.handles(2, [0, 1])
        aborted = waiting = ""
        if rank == 0:
            work = me.sum(torch.ones(_LARGE))
            me.group.abort()
            aborted = _failure(work.wait)
            over = threading.Event()

            def abort_until_over() -> None:
                while not over.wait(0.05):
                    me.group.abort()

            aborter = threading.Thread(target=abort_until_over)
            aborter.start()
            waiting = _failure(lambda: me.configure(2, handles))
            over.set()
            aborter.join()
        me.reconfigure(3, [0, 1])
        return {"aborted": aborted, "waiting": waiting, "found": me.found()}


def make_invalid_calls(url: str, prefix: str, rank: int) -> list[Any]:
    """Invalid calls raise and leave the group unchanged."""
    with member(url, prefix, rank, 2) as me:
        me.reconfigure(1, [0, 1])
        handles = me.handles(2, [0, 1])
        return [
            _failure(lambda: me.configure(1, handles)),
            _failure(lambda: me.configure(2, handles[1 - rank : 2 - rank])),
            _failure(lambda: me.configure(2, handles + handles)),
            me.found(),
        ]


def average_with_ddp(url: str, prefix: str, rank: int) -> list[Any]:
    """The C++ reducer of DDP divides by the current number of ranks."""
    with member(url, prefix, rank, 3) as me:
        me.reconfigure(1, [0, 1, 2])
        if rank == 2:
            return []
        me.reconfigure(2, [0, 1])
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        net(torch.full((1, 1), 2.0 * (rank + 1))).sum().backward()
        gradient = net.module.weight.grad
        assert gradient is not None
        return [gradient.item()]
