"""Process group of one generation, with the collectives that the session needs.

Every failure of a collective is raised as `MembershipChanged`, because a group is discarded at the
first failure. A world of one has no process group, and its collectives return their inputs.

Strategies that split a model along several axes use subsets of the ranks as groups of their own,
called parts (`subgroup`). A group and its parts are aborted together, so that no rank waits in one
of them for a rank that has left another.

The training thread issues the collectives. `abort` may be called from any thread, and releases a
training thread that is waiting in a collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError, MembershipChanged, PreconditionError, ShoalError
from torch.distributed import (
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
    Store,
)

from shoal_worker.backends.base import CommunicationBackend, Traffic, cause_of
from shoal_worker.elastic.contract.generation import Generation
from shoal_worker.elastic.group.waiting import Waiting
from shoal_worker.store.redis_store import RedisStore
from shoal_worker.torch_internals import AllgatherOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupConfiguration:
    """Settings for connecting the groups of one generation."""

    make_backend: Callable[[], CommunicationBackend]
    store: Callable[[str], Store]
    """Returns a new store with the given name. Ranks that use the same name share a store."""
    hostname: str | None
    connect_timeout: timedelta
    collective_timeout: timedelta

    def initialize(
        self,
        backend: CommunicationBackend,
        generation: Generation,
        store: Store,
        members: Sequence[int] | None = None,
    ) -> None:
        """Connects `backend` for a generation. For `members` and the errors, see
        `CommunicationBackend.initialize`."""
        backend.initialize(
            rank=generation.rank,
            world_size=generation.world_size,
            store=store,
            timeout=self.collective_timeout,
            connect_timeout=self.connect_timeout,
            hostname=self.hostname,
            members=members,
        )


def number_of_part(
    members: Sequence[int], division: Sequence[Sequence[int]], world_size: int
) -> int | None:
    """Returns the index in `division` of the part that consists of the ranks `members`. Returns
    None if the division does not contain every rank exactly once.

    Raises:
        ConfigurationError: the division has no part with these members, or its parts differ in
            size.
    """
    parts = [list(part) for part in division]
    if sorted(rank for part in parts for rank in part) != list(range(world_size)):
        return None
    if list(members) not in parts or len({len(part) for part in parts}) > 1:
        raise ConfigurationError(
            f"subgroup({list(members)}) of division={parts}: expected one of the division's "
            "parts, all of equal size"
        )
    return parts.index(list(members))


_Sum = TypeVar("_Sum")
_FAILURES = (RuntimeError, ValueError)
"""Exceptions raised by c10d, including DistError and DistBackendError."""
_LEAVE_WITHIN = timedelta(seconds=2)
"""Maximum time that a rank waits for the others after it has finished the run, so that all can shut
down together. It is too short for ranks that still have to write or compute something."""


class Group:
    """Connected ranks of one generation, or some of these ranks (`subgroup`)."""

    def __init__(
        self,
        generation: Generation,
        backend: CommunicationBackend | None,
        store: Store | None,
        configuration: GroupConfiguration | None = None,
        parent: Group | None = None,
    ) -> None:
        """`backend`: initialized backend; None in a world of one. The group takes ownership of
        `backend` and `store`. `configuration`: settings for connecting parts of the group.
        `parent`: group of which this group is a part."""
        self.generation = generation
        self.rank = generation.rank
        """Rank of this member in the group."""
        self.world_size = generation.world_size
        """Number of ranks in the group."""
        self.broken: str | None = None
        """Reason why the group has ended; None while it is usable."""
        self._backend = backend
        self._store = store
        self._configuration = configuration
        self._parent = parent
        self.waiting: Waiting = (
            parent.waiting
            if parent is not None
            else Waiting(store if isinstance(store, RedisStore) else None)
        )
        """Current wait of the training thread in this group."""
        self._parts: list[Group] = []
        self._connections: Counter[str] = Counter()
        """Number of parts connected so far under each name. It makes the names of the parts' stores
        unique."""
        self._lock = threading.Lock()
        self._guarded: list[socket.socket] = []

    @property
    def device(self) -> torch.device:
        """Device for tensors of collectives."""
        kind = self._backend.device_type if self._backend is not None else "cpu"
        return (
            torch.device("cuda", torch.cuda.current_device())
            if kind == "cuda"
            else torch.device(kind)
        )

    @property
    def ended(self) -> bool:
        """True if the group is known to have ended, on this rank or on a peer. Does not wait."""
        backend = self._backend
        return self.broken is not None or (backend is not None and not backend.is_initialized)

    def traffic(self) -> dict[str, Traffic]:
        """Returns the traffic of the group's connections so far; see
        `CommunicationBackend.traffic`. Thread-safe."""
        backend = self._backend
        return backend.traffic() if backend is not None else {}

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's process group, for torch's own parallel code. Not available in a world of one.
        The caller must not keep a reference after this group has ended.

        Raises:
            MembershipChanged: the group has ended.
        """
        self._check()
        return self._process_group

    def subgroup(
        self, ranks: Sequence[int], name: str, division: Sequence[Sequence[int]] = ()
    ) -> Group | None:
        """Connects some of the ranks as a separate group, in the given order. Returns None on a
        rank that is not in `ranks`.

        Must be called on all of these ranks. A rank that belongs to several parts must connect them
        in the same order as its peers. If a rank has failed elsewhere, `abort` releases the ranks
        that are waiting for it here. Ranks within the part are numbered from 0, and the part's
        `generation.peers` contains only its ranks. Aborting or closing this group also aborts the
        part. A failure in the part aborts this group and all its parts, on all ranks.

        Args:
            ranks: distinct ranks of this group. If they are all ranks in order, this group itself
                is returned.
            name: name of the part. No other set of ranks in this group may use the name. The same
                ranks may connect several parts under one name, if all do so in the same order.
            division: all parts that the ranks of this group connect at this point, including
                `ranks`; the parts must have the same size, and the division must be the same on all
                ranks. If it contains every rank and the library can split a group, the group is
                split.

        Raises:
            ConfigurationError: `ranks` contains ranks outside of this group, or duplicates.
            MembershipChanged: a rank did not arrive, or the group has ended.
        """
        members = list(ranks)
        if (
            not members
            or len(set(members)) != len(members)
            or not set(members) <= set(range(self.world_size))
        ):
            raise ConfigurationError(
                f"subgroup({members}): expected distinct ranks from 0 to {self.world_size - 1}"
            )
        self._check()
        if members == list(range(self.world_size)):
            return self
        if self.rank not in members:
            return None
        if len(members) == 1:
            return self._adopt(Group(self.generation.part(members), None, None, parent=self))
        return self._connect_part(members, name, number_of_part(members, division, self.world_size))

    def connected_again(self, name: str) -> Group:
        """Connects all ranks a second time, for collectives whose order relative to other
        collectives may differ between ranks. Raises the same errors as `subgroup`."""
        self._check()
        return self._connect_part(list(range(self.world_size)), name)

    def _connect_part(self, members: list[int], name: str, number: int | None = None) -> Group:
        if self._configuration is None:
            raise ConfigurationError(
                f"subgroup({members}): this group is already a subgroup and cannot be divided "
                "further; divide the generation's group"
            )
        self._connections[name] += 1  # several models may each connect a part with this name
        name = f"{name} {self._connections[name]}"
        store, backend = self._configuration.store(name), self._configuration.make_backend()
        if number is not None and self._backend is not None:
            self.settle()  # no collective may be pending in a group that is split
            backend.comes_from(self._backend, number)
        generation = self.generation.part(members)
        part = self._adopt(Group(generation, backend, store, parent=self))
        try:
            self._configuration.initialize(backend, generation, store, members)
        except (RuntimeError, ShoalError) as error:
            raise part._over(f"connecting part {name!r}", error) from error
        return part

    def _adopt(self, part: Group) -> Group:
        """Registers a part before it is connected, so that `abort` of this group also aborts the
        part."""
        with self._lock:
            self._parts.append(part)
            reason = self.broken
        if reason is not None:
            part.abort(reason)
        return part

    def all_reduce_async(self, tensor: torch.Tensor) -> dist.Work | None:
        """Starts an in-place all-reduce (sum) of `tensor`. Returns None in a world of one.

        Raises:
            MembershipChanged: the group has ended.
        """
        if self.world_size == 1:
            self._check()
            return None
        with self._failures("all_reduce"):
            return self._process_group.allreduce([tensor], dist.AllreduceOptions())

    def all_gather_async(self, full: torch.Tensor, shard: torch.Tensor) -> dist.Work:
        """Starts an all-gather: fills the flat `full` with every rank's `shard`, in rank order.

        Raises:
            MembershipChanged: the group has ended.
        """
        with self._failures("all_gather"):
            return self._process_group.all_gather_single(full, shard, AllgatherOptions())

    def reduce_scatter_async(self, shard: torch.Tensor, full: torch.Tensor) -> dist.Work:
        """Starts a reduce-scatter: sums the flat `full` across all ranks, and stores this rank's
        part of the sum in `shard`.

        Raises:
            MembershipChanged: the group has ended.
        """
        with self._failures("reduce_scatter"):
            return self._process_group.reduce_scatter_single(shard, full, ReduceScatterOptions())

    def all_to_all_async(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
    ) -> dist.Work:
        """Starts an all-to-all: sends part j of the flat `tensor` to rank j, and receives part i of
        `output` from rank i. Sizes are in elements.

        Raises:
            MembershipChanged: the group has ended.
        """
        with self._failures("all_to_all"):
            return self._process_group.all_to_all_single(
                output, tensor, list(output_sizes), list(input_sizes), AllToAllOptions()
            )

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
    ) -> None:
        """Runs `all_to_all_async` and waits for the result.

        Raises:
            MembershipChanged: the group has ended.
        """
        if self.world_size == 1:
            self._check()
            output.copy_(tensor)
        else:
            self.wait(self.all_to_all_async(output, tensor, output_sizes, input_sizes))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copies the contiguous `tensor` of rank `source` into `tensor` on every rank.

        Raises:
            MembershipChanged: the group has ended.
        """
        if self.world_size == 1:
            self._check()
        else:
            self._broadcast(lambda: self._process_group, tensor, source)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums `tensor` across all ranks, in place.

        Raises:
            MembershipChanged: the group has ended.
        """
        work = self.all_reduce_async(tensor)
        if work is not None:
            self.wait(work)

    def all_reduce_short(self, tensor: torch.Tensor) -> None:
        """Sums a `tensor` of a few hundred bytes across all ranks, in place. Uses the backend's
        fastest method for short messages.

        Raises:
            MembershipChanged: the group has ended.
            PreconditionError (RANKS_DIVERGED): another rank is summing different values. The group
                has ended. All ranks raise this error if they share a store in Redis."""
        if self.world_size == 1:
            self._check()
        else:
            self._short(lambda backend: backend.all_reduce_short(tensor))

    def _short(self, add_up: Callable[[CommunicationBackend], _Sum]) -> _Sum:
        self.settle()
        with self._failures("all_reduce"), self.waiting:
            try:
                return add_up(self._live_backend)
            except PreconditionError as error:
                self.waiting.condemn(str(error))
                self.abort(str(error))
                raise
            except MembershipChanged as error:
                raise self._over("all_reduce", error) from error

    def sum_numbers(self, values: Sequence[float]) -> list[float]:
        """Sums a few dozen numbers elementwise across all ranks. Raises the same errors as
        `all_reduce_short`."""
        if self.world_size == 1:
            self._check()
            return [*values]
        return self._short(lambda backend: backend.sum_numbers(values))

    def wait(self, work: dist.Work) -> None:
        """Waits for a collective that has been started.

        Raises:
            MembershipChanged: the collective failed.
        """
        with self._failures("all_reduce"), self.waiting:
            work.wait()

    def order(self, work: dist.Work) -> None:
        """Makes computation that the calling thread queues later run after a collective that has
        been started; on a GPU, without blocking the host. See `CommunicationBackend.order`.

        Raises:
            MembershipChanged: the collective failed.
        """
        with self._failures("a collective"), self.waiting:
            self._live_backend.order(work)

    def settle(self) -> None:
        """Waits until all collectives passed to `order` have succeeded, in this group, its parts
        and its parent.

        All methods that sum values on the host, including the commit all-reduce, call this method
        first. Therefore, no rank reports a step as prepared before the step's collectives have
        succeeded.

        Raises:
            MembershipChanged: a collective has failed, or a group has ended. When this error is
                raised, no operation of the group writes to memory any more.
        """
        whole = self
        while whole._parent is not None:
            whole = whole._parent
        for group in whole._with_parts():
            if group._backend is not None and group._backend.unsettled:
                with group._failures("a collective"), group.waiting:
                    group._live_backend.settle()

    def _with_parts(self) -> Iterator[Group]:
        yield self
        for part in list(self._parts):
            yield from part._with_parts()

    @contextlib.contextmanager
    def own_collectives(self, what: str) -> Iterator[CommunicationBackend]:
        """Yields the backend, for callers that issue collectives, or wait for them, directly. Must
        not be used in a world of one. `what`: name of the collectives, for error messages.

        Raises:
            MembershipChanged: the group has ended, or a collective within the block has failed.
        """
        with self._failures(what), self.waiting:
            backend = self._live_backend
            try:
                yield backend
            except MembershipChanged as error:
                raise self._over(what, error) from error

    def all_gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Returns every rank's `values`, in rank order. All ranks must pass the same number of
        values."""
        return [t.tolist() for t in self._all_gather(torch.tensor(values, dtype=torch.int64))]

    def rendezvous(self) -> None:
        """Waits until all ranks have called this method. Uses a collective that steps do not use,
        so if some ranks are in a step and others are here, they merely wait for each other. If
        steps used the same kind of collective, ranks would receive each other's messages, and Gloo
        would terminate the processes if the message sizes differed."""
        if self.world_size == 1:
            self._check()
            return
        with self._failures("barrier"), self.waiting:
            self._live_backend.host_group.barrier(BarrierOptions()).wait()

    def exchange(self, payload: bytes) -> list[bytes]:
        """Sends `payload` to all ranks and returns every rank's payload, in rank order. Runs two
        all-gathers: one for the lengths, and one for the bytes. If only a few ranks send more than
        a megabyte, broadcasts replace the second all-gather, which would pad all payloads to the
        longest."""
        lengths = [row[0] for row in self.all_gather_integers([len(payload)])]
        longest = max(lengths)
        if longest == 0:
            return [b""] * self.world_size
        if longest > 1 << 20 and 2 * sum(lengths) < longest * self.world_size:
            return [
                self._broadcast_bytes(payload, rank, length) if length else b""
                for rank, length in enumerate(lengths)
            ]
        padded = torch.zeros(longest, dtype=torch.uint8)
        if payload:
            padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        gathered = self._all_gather(padded)
        return [bytes(t[:n].numpy()) for t, n in zip(gathered, lengths, strict=True)]

    def _broadcast_bytes(self, payload: bytes, rank: int, length: int) -> bytes:
        received = torch.frombuffer(
            bytearray(payload if rank == self.rank else length), dtype=torch.uint8
        )
        self._broadcast(lambda: self._live_backend.host_group, received, rank)
        return payload if rank == self.rank else bytes(received.numpy())

    def abort(self, reason: str) -> None:
        """Aborts the group: current and later collectives fail with `reason`. Thread-safe; does not
        block."""
        with self._lock:
            if self.broken is not None:
                return
            self.broken = reason
            guarded, parts = list(self._guarded), list(self._parts)
        for connection in guarded:
            _shut_down(connection)
        if self._backend is not None:
            self._backend.abort(reason)
        if isinstance(self._store, RedisStore):
            self._store.abort(reason)
        for part in parts:
            part.abort(reason)
        if self._parent is not None:
            self._parent.abort(reason)

    @contextlib.contextmanager
    def guarding(self) -> Iterator[Callable[[socket.socket], None]]:
        """Yields a function that registers a socket with the group. `abort` shuts down the
        registered sockets, so that no thread continues to wait on them."""
        own: list[socket.socket] = []

        def guard(connection: socket.socket) -> None:
            with self._lock:
                own.append(connection)
                self._guarded.append(connection)
                has_ended = self.broken is not None
            if has_ended:
                _shut_down(connection)

        try:
            yield guard
        finally:
            with self._lock:
                self._guarded = [s for s in self._guarded if s not in own]

    def close(self) -> None:
        """Closes the group and releases its sockets and threads."""
        self.abort("the group was closed")
        self.leave()

    def all_leave(self, within: timedelta = _LEAVE_WITHIN) -> None:
        """Lets the communication library shut down this group and its parts in an orderly way.
        Called before `close` or `leave` at the end of the run. Does nothing if the library has no
        orderly shutdown (`CommunicationBackend.finalize`), or if not all ranks call this method
        within `within`.
        """
        backend = self._backend
        if self.ended or backend is None or not backend.finalizes or not backend.all_leave(within):
            return
        for wait in [
            group._backend.finalize() for group in self._with_parts() if group._backend is not None
        ]:
            wait()

    def leave(self) -> None:
        """Closes the group without informing the other ranks, if the backend can do so. The others
        fail only if they run a collective that needs this rank."""
        with self._lock:
            self.broken = self.broken or "this rank has left the group"
            parts, self._parts = self._parts, []
            backend, self._backend, self._store = self._backend, None, None
        for part in parts:
            part.leave()
        if backend is not None:
            backend.shutdown()

    @property
    def _process_group(self) -> dist.ProcessGroup:
        return self._live_backend.process_group

    def _broadcast(
        self, group: Callable[[], dist.ProcessGroup], tensor: torch.Tensor, source: int
    ) -> None:
        options = BroadcastOptions()
        options.rootRank = source
        with self._failures("broadcast"), self.waiting:
            group().broadcast([tensor], options).wait()

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        if self.world_size == 1:
            self._check()
            return [mine]
        with self._failures("all_gather"), self.waiting:
            outputs = [torch.empty_like(mine) for _ in range(self.world_size)]
            self._live_backend.host_group.allgather([outputs], [mine], AllgatherOptions()).wait()
            return outputs

    def _check(self) -> None:
        if self.broken is not None:
            backend = self._backend
            if backend is not None:
                backend.rest()  # once this error is raised, the caller may reuse the memory
            raise self._ended(
                MembershipChanged(f"generation {self.generation.number} is over: {self.broken}")
            )

    @property
    def _live_backend(self) -> CommunicationBackend:
        if self._backend is None:
            raise MembershipChanged(f"generation {self.generation.number} is over: {self.broken}")
        return self._backend

    def _failures(self, what: str) -> _Failures:
        return _Failures(self, what)

    def _over(self, what: str, error: Exception) -> ShoalError:
        """Aborts the group because of `error` in a collective, and returns the exception to raise.
        `what`: name of the collective."""
        reason = self.broken or f"{what} failed: {cause_of(error)}"
        # closes the sockets, so that peers waiting in the same collective are released too
        self.abort(reason)
        return self._ended(
            MembershipChanged(f"generation {self.generation.number} is over: {reason}")
        )

    def _ended(self, error: MembershipChanged) -> ShoalError:
        """Returns the exception to raise for a group that has ended: `error`, or a
        PreconditionError if a rank has detected that the scripts have diverged."""
        verdict = self.waiting.verdict
        return error if verdict is None else PreconditionError(verdict, reason="RANKS_DIVERGED")


class _Failures:
    """Context manager around a collective. If the collective fails, aborts the group and raises a
    Shoal error. This is a class because a generator-based context manager takes three times as
    long, and each step enters several."""

    __slots__ = ("_group", "_what")

    def __init__(self, group: Group, what: str) -> None:
        self._group = group
        self._what = what

    def __enter__(self) -> None:
        self._group._check()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        group = self._group
        if isinstance(error, MembershipChanged):
            # the backend has reported that its group has ended, so this group ends too
            group.abort(str(error))
            if group.waiting.verdict is not None:
                raise group._ended(error) from error
        elif isinstance(error, _FAILURES) and not isinstance(error, ShoalError):
            raise group._over(self._what, error) from error


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # its peer has closed it
        # SSLSocket's own method would let another thread continue in plain text
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
