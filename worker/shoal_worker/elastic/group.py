"""The process group of one generation, with the few collectives that the session needs.

Every failure of a collective comes out as `MembershipChanged`: for a group that is thrown away at the first failure, that is what it
means. A world of one has no process group at all; its collectives are identities.

The training thread issues the collectives. `abort` may be called from any thread, and is what frees a training thread that is stuck in one.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from shoal_common.errors import MembershipChanged, ShoalError
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, ReduceScatterOptions

from shoal_worker.backends.base import CommunicationBackend
from shoal_worker.elastic.generation import Generation
from shoal_worker.store.redis_store import RedisStore

_FAILURES = (RuntimeError, ValueError)
"""What c10d raises, DistError and DistBackendError among them."""


class Channel(Protocol):
    """What an operation between steps may use: a group, or a world of one."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def exchange(self, payload: bytes) -> list[bytes]:
        """Sends `payload` to all ranks and returns everybody's, in rank order."""
        ...


class LocalChannel:
    """A world of one."""

    rank = 0
    world_size = 1

    def exchange(self, payload: bytes) -> list[bytes]:
        """Returns what was given."""
        return [payload]


class Group:
    """The ranks of one generation, connected."""

    def __init__(self, generation: Generation, backend: CommunicationBackend | None, store: RedisStore | None) -> None:
        """`backend` is initialized already; None in a world of one. Takes over `backend` and `store`."""
        self.generation = generation
        self._backend = backend
        self._store = store
        self._reason: str | None = None
        self._lock = threading.Lock()
        self._guarded: list[socket.socket] = []

    @property
    def rank(self) -> int:
        """This member's rank."""
        return self.generation.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.generation.world_size

    @property
    def device(self) -> torch.device:
        """Where tensors of collectives must live."""
        return torch.device("cuda", torch.cuda.current_device()) if self._backend and self._backend.name == "nccl" else torch.device("cpu")

    @property
    def broken(self) -> str | None:
        """Why the group is over; None: it is not."""
        return self._reason

    def all_reduce_async(self, tensor: torch.Tensor) -> dist.Work | None:
        """Starts to sum `tensor` over all ranks in place; None: nothing to wait for.

        Raises:
            MembershipChanged: the group is over.
        """
        if self.world_size == 1:
            self._check()
            return None
        self._check()
        try:
            return self._process_group.allreduce([tensor], dist.AllreduceOptions())
        except ShoalError:
            raise
        except _FAILURES as error:
            raise self._over("all_reduce", error) from error

    def all_gather_async(self, full: torch.Tensor, shard: torch.Tensor) -> dist.Work:
        """Starts to fill the flat `full` with everybody's `shard`, by rank.

        Raises:
            MembershipChanged: the group is over.
        """
        with self._failures("all_gather"):
            return self._process_group.all_gather_single(full, shard, AllgatherOptions())

    def reduce_scatter_async(self, shard: torch.Tensor, full: torch.Tensor) -> dist.Work:
        """Starts to sum the flat `full` over all ranks; this rank's part of the sum goes to `shard`.

        Raises:
            MembershipChanged: the group is over.
        """
        with self._failures("reduce_scatter"):
            return self._process_group.reduce_scatter_single(shard, full, ReduceScatterOptions())

    def all_to_all_async(
        self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> dist.Work:
        """Starts to send part j of the flat `tensor` to rank j, and to receive part i of `output` from rank i; sizes in elements.

        Raises:
            MembershipChanged: the group is over.
        """
        with self._failures("all_to_all"):
            return self._process_group.all_to_all_single(output, tensor, list(output_sizes), list(input_sizes), AllToAllOptions())

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]) -> None:
        """As `all_to_all_async`, and waits.

        Raises:
            MembershipChanged: the group is over.
        """
        if self.world_size == 1:
            self._check()
            output.copy_(tensor)
        else:
            self.wait(self.all_to_all_async(output, tensor, output_sizes, input_sizes))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums `tensor` over all ranks in place.

        Raises:
            MembershipChanged: the group is over.
        """
        work = self.all_reduce_async(tensor)
        if work is not None:
            self.wait(work)

    def wait(self, work: dist.Work) -> None:
        """Waits for a collective that was started.

        Raises:
            MembershipChanged: it failed.
        """
        self._check()
        try:
            work.wait()
        except ShoalError:
            raise
        except _FAILURES as error:
            raise self._over("all_reduce", error) from error

    def all_gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Everybody's `values` (equally many on all ranks), in rank order."""
        mine = torch.tensor(values, dtype=torch.int64, device=self.device)
        return [t.tolist() for t in self._all_gather(mine)]

    def exchange(self, payload: bytes) -> list[bytes]:
        """Sends `payload` to all ranks and returns everybody's, in rank order. Two all-gathers: lengths, then bytes."""
        lengths = [row[0] for row in self.all_gather_integers([len(payload)])]
        if not any(lengths):
            return [b""] * self.world_size
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        if payload:
            padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        gathered = self._all_gather(padded.to(self.device))
        return [bytes(t[:n].cpu().numpy()) for t, n in zip(gathered, lengths, strict=True)]

    def abort(self, reason: str) -> None:
        """Ends the group: collectives that run or come later fail with `reason`. From any thread; returns at once."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            guarded = list(self._guarded)
        for connection in guarded:
            _shut_down(connection)
        if self._backend is not None:
            self._backend.abort(reason)
        if self._store is not None:
            self._store.abort(reason)

    @contextlib.contextmanager
    def guarding(self) -> Iterator[Callable[[socket.socket], None]]:
        """Gives a function that puts a socket under the group's `abort`: it is shut down then, so that nobody waits on it."""
        own: list[socket.socket] = []

        def guard(connection: socket.socket) -> None:
            with self._lock:
                own.append(connection)
                self._guarded.append(connection)
                broken = self._reason is not None
            if broken:
                _shut_down(connection)

        try:
            yield guard
        finally:
            with self._lock:
                self._guarded = [s for s in self._guarded if s not in own]

    def close(self) -> None:
        """Lets go of sockets and threads."""
        self.abort("the group was closed")
        backend, self._backend, self._store = self._backend, None, None
        if backend is not None:
            backend.shutdown()

    @property
    def _process_group(self) -> dist.ProcessGroup:
        backend = self._backend
        if backend is None:
            raise MembershipChanged(f"generation {self.generation.number} is over: {self._reason}")
        return backend.process_group

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        if self.world_size == 1:
            self._check()
            return [mine]
        with self._failures("all_gather"):
            outputs = [torch.empty_like(mine) for _ in range(self.world_size)]
            self._process_group.allgather([outputs], [mine], AllgatherOptions()).wait()
            return outputs

    def _check(self) -> None:
        if self._reason is not None:
            raise MembershipChanged(f"generation {self.generation.number} is over: {self._reason}")

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        self._check()
        try:
            yield
        except ShoalError:
            raise
        except _FAILURES as error:
            raise self._over(what, error) from error

    def _over(self, what: str, error: Exception) -> MembershipChanged:
        """What to raise for `error` of a collective: it ends the group."""
        reason = self._reason or f"{what} failed: {brief(error)}"
        self.abort(reason)  # closes the sockets, so that peers stuck in the same collective are freed as well
        return MembershipChanged(f"generation {self.generation.number} is over: {reason}")


class Forming:
    """A generation being connected: can be given up from another thread."""

    def __init__(self, generation: Generation, store: RedisStore | None) -> None:
        self.generation = generation
        self._store = store

    def abort(self, reason: str) -> None:
        """Makes the connecting thread fail at once."""
        if self._store is not None:
            self._store.abort(reason)


def connect(
    generation: Generation,
    *,
    make_backend: Callable[[], CommunicationBackend],
    store_url: str,
    prefix: str,
    host: str,
    arrival_timeout: timedelta,
    connect_timeout: timedelta,
    collective_timeout: timedelta,
    announce: Callable[[Forming], None],
) -> Group:
    """Connects this member to the others of `generation` over a store prefix that nobody used before.

    Waits first until all have arrived: peers may still be building their models, or finishing a forward pass. Only then does it connect,
    with a short deadline. `announce` gets the handle by which another thread can give up the attempt, before anything blocks.

    Raises:
        MembershipChanged: given up, a peer went away, not all arrived within `arrival_timeout` or connected within `connect_timeout`.
    """
    if generation.world_size == 1:
        announce(Forming(generation, None))
        return Group(generation, None, None)
    store = RedisStore(store_url, prefix, timeout=connect_timeout)
    announce(Forming(generation, store))
    try:
        if store.add("arrived", 1) == generation.world_size:
            store.set("complete", b"1")
        store.wait(["complete"], arrival_timeout)
        backend = make_backend()
        backend.initialize(
            rank=generation.rank,
            world_size=generation.world_size,
            store=store,
            timeout=collective_timeout,
            connect_timeout=connect_timeout,
            hostname=host,
        )
    except MembershipChanged:
        raise
    except (RuntimeError, ShoalError) as error:
        raise MembershipChanged(f"generation {generation.number} did not form: {brief(error)}") from error
    return Group(generation, backend, store)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def brief(error: BaseException) -> str:
    """What an error of c10d says, without its source position and its advice."""
    line = str(error).strip().split("\n", 1)[0]
    line = re.sub(r"^Got the following error when running the callback: \w+: ", "", line)
    return re.sub(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\] ", "", line).split(" This is typically ", 1)[0][:300]
