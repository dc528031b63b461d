"""The process group of one generation, with the few collectives that the session needs.

Every failure of a collective comes out as `MembershipChanged`: for a group that is thrown away at
the first failure, that is what it means. A world of one has no process group at all; its
collectives are identities.

Strategies that cut a model along several axes work in parts of it (`subgroup`): groups like this
one, which end with it, and it with them, so that nobody waits in one for a rank that has left
another.

The training thread issues the collectives. `abort` may be called from any thread, and is what frees
a training thread that is stuck in one.
"""

from __future__ import annotations

import contextlib
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
from shoal_worker.elastic.generation import Generation
from shoal_worker.elastic.opening import Opening, number_of_part
from shoal_worker.elastic.waiting import Waiting
from shoal_worker.store.redis_store import RedisStore
from shoal_worker.torch_internals import AllgatherOptions

_Sum = TypeVar("_Sum")
_FAILURES = (RuntimeError, ValueError)
"""What c10d raises, DistError and DistBackendError among them."""
_LEAVE_WITHIN = timedelta(seconds=2)
"""Ranks come to the end of a run within this of each other, unless one has something to write or to
compute that others have not."""


class Group:
    """The ranks of one generation, connected; or some of them (`subgroup`)."""

    def __init__(
        self,
        generation: Generation,
        backend: CommunicationBackend | None,
        store: Store | None,
        opening: Opening | None = None,
        parent: Group | None = None,
    ) -> None:
        """`backend` is initialized already; None in a world of one. Takes over `backend` and
        `store`. `opening` connects parts of it."""
        self.generation = generation
        self._backend = backend
        self._store = store
        self._opening = opening
        self._parent = parent
        self.waiting: Waiting = (
            parent.waiting
            if parent is not None
            else Waiting(store if isinstance(store, RedisStore) else None)
        )
        """What the training thread waits for in here."""
        self._parts: list[Group] = []
        self._connections: Counter[str] = Counter()
        """How many parts were connected under each name: the store of each is its own."""
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
        kind = self._backend.device_type if self._backend is not None else "cpu"
        return (
            torch.device("cuda", torch.cuda.current_device())
            if kind == "cuda"
            else torch.device(kind)
        )

    @property
    def broken(self) -> str | None:
        """Why the group is over; None: it is not."""
        return self._reason

    @property
    def ended(self) -> bool:
        """It is over, here or for a peer, as far as this rank has noticed without waiting for
        one."""
        backend = self._backend
        return self._reason is not None or (backend is not None and not backend.is_initialized)

    def traffic(self) -> dict[str, Traffic]:
        """What its connections have sent so far; see `CommunicationBackend.traffic`. Any thread."""
        backend = self._backend
        return backend.traffic() if backend is not None else {}

    @property
    def process_group(self) -> dist.ProcessGroup:
        """What torch's own parallel code takes; a group of one rank has none. Not to be kept longer
        than this.

        Raises:
            MembershipChanged: the group is over.
        """
        self._check()
        return self._process_group

    def subgroup(
        self, ranks: Sequence[int], name: str, division: Sequence[Sequence[int]] = ()
    ) -> Group | None:
        """Connects some of the ranks to a group of their own, in the order given; None on a rank
        that is not among them.

        A collective of those ranks: one that is in several parts connects them in the same order as
        the others. Who waits here for a rank that failed elsewhere is freed by `abort`, as
        everywhere. The part's ranks count from 0, and `generation.peers` are its own. It ends with
        this group: an `abort` or `close` of this one ends it, and a failure in it ends this one,
        with all its parts, on all ranks.

        Args:
            ranks: of this group, each once. All of them in order: the answer is this group itself.
            name: of the part; used for no other ranks of this group. These may connect several
                under one name, in one order.
            division: parts of equal size, of which `ranks` are one, that all ranks of this group
                connect at this place of their scripts; the same on all. Libraries that can split a
                group do, if no rank of it is left out.

        Raises:
            ConfigurationError: ranks that are not this group's, or twice the same.
            MembershipChanged: a rank did not come, or the group is over.
        """
        members = list(ranks)
        if (
            not members
            or len(set(members)) != len(members)
            or not set(members) <= set(range(self.world_size))
        ):
            raise ConfigurationError(
                f"subgroup({members}): expected different ranks from 0 to {self.world_size - 1}"
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
        """Connects all ranks a second time, for collectives whose order among the group's others
        differs by rank. Raises as `subgroup`."""
        self._check()
        return self._connect_part(list(range(self.world_size)), name)

    def _connect_part(self, members: list[int], name: str, number: int | None = None) -> Group:
        if self._opening is None:
            raise ConfigurationError(
                f"subgroup({members}): this group cannot be divided further; divide the "
                "generation's own"
            )
        self._connections[name] += 1  # of several models each may connect its own
        name = f"{name} {self._connections[name]}"
        store, backend = self._opening.store(name), self._opening.make_backend()
        if number is not None and self._backend is not None:
            self.settle()  # a group that is split has nothing to do
            backend.comes_from(self._backend, number)
        generation = self.generation.part(members)
        part = self._adopt(Group(generation, backend, store, parent=self))
        try:
            self._opening.initialize(backend, generation, store, members)
        except (RuntimeError, ShoalError) as error:
            raise part._over(f"connecting part {name!r}", error) from error
        return part

    def _adopt(self, part: Group) -> Group:
        """Known before it connects, so that an `abort` of this group ends that as well."""
        with self._lock:
            self._parts.append(part)
            reason = self._reason
        if reason is not None:
            part.abort(reason)
        return part

    def all_reduce_async(self, tensor: torch.Tensor) -> dist.Work | None:
        """Starts to sum `tensor` over all ranks in place; None: nothing to wait for.

        Raises:
            MembershipChanged: the group is over.
        """
        if self.world_size == 1:
            self._check()
            return None
        with self._failures("all_reduce"):
            return self._process_group.allreduce([tensor], dist.AllreduceOptions())

    def all_gather_async(self, full: torch.Tensor, shard: torch.Tensor) -> dist.Work:
        """Starts to fill the flat `full` with everybody's `shard`, by rank.

        Raises:
            MembershipChanged: the group is over.
        """
        with self._failures("all_gather"):
            return self._process_group.all_gather_single(full, shard, AllgatherOptions())

    def reduce_scatter_async(self, shard: torch.Tensor, full: torch.Tensor) -> dist.Work:
        """Starts to sum the flat `full` over all ranks; this rank's part of the sum goes to
        `shard`.

        Raises:
            MembershipChanged: the group is over.
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
        """Starts to send part j of the flat `tensor` to rank j, and to receive part i of `output`
        from rank i; sizes in elements.

        Raises:
            MembershipChanged: the group is over.
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
        """Starts what `all_to_all_async` does, and waits for it.

        Raises:
            MembershipChanged: the group is over.
        """
        if self.world_size == 1:
            self._check()
            output.copy_(tensor)
        else:
            self.wait(self.all_to_all_async(output, tensor, output_sizes, input_sizes))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copies the contiguous `tensor` of rank `source` into everybody's.

        Raises:
            MembershipChanged: the group is over.
        """
        if self.world_size == 1:
            self._check()
        else:
            self._broadcast(lambda: self._process_group, tensor, source)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums `tensor` over all ranks in place.

        Raises:
            MembershipChanged: the group is over.
        """
        work = self.all_reduce_async(tensor)
        if work is not None:
            self.wait(work)

    def all_reduce_short(self, tensor: torch.Tensor) -> None:
        """Sums a `tensor` of a few hundred bytes over all ranks in place and waits, on the
        backend's quickest way.

        Raises:
            MembershipChanged: the group is over.
            PreconditionError: another rank sums something else: RANKS_DIVERGED. The group is over,
                with this error on all ranks if they share a store in Redis.
        """
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
        """Sums over all ranks what each gives, number by number: a few dozen. Raises as
        `all_reduce_short`."""
        if self.world_size == 1:
            self._check()
            return [*values]
        return self._short(lambda backend: backend.sum_numbers(values))

    def wait(self, work: dist.Work) -> None:
        """Waits for a collective that was started.

        Raises:
            MembershipChanged: it failed.
        """
        with self._failures("all_reduce"), self.waiting:
            work.wait()

    def order(self, work: dist.Work) -> None:
        """Has what the calling thread computes next come after a collective that was started; see
        `CommunicationBackend.order`.

        Raises:
            MembershipChanged: it failed.
        """
        with self._failures("a collective"), self.waiting:
            self._live_backend.order(work)

    def settle(self) -> None:
        """Returns when all collectives that were ordered have ended well: in this group, in its
        parts, and in the one that it is a part of.

        A closing and whatever else hosts sum asks for it by itself, so that no rank can say more
        than it knows.

        Raises:
            MembershipChanged: some collective has failed, or a group is over; nothing of it writes
                into memory then.
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
        """For who issues or awaits collectives of the group's backend himself. Not in a world of
        one.

        Raises:
            MembershipChanged: the group is over, or a collective in there has failed.
        """
        with self._failures(what), self.waiting:
            backend = self._live_backend
            try:
                yield backend
            except MembershipChanged as error:
                raise self._over(what, error) from error

    def all_gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Everybody's `values` (equally many on all ranks), in rank order."""
        return [t.tolist() for t in self._all_gather(torch.tensor(values, dtype=torch.int64))]

    def meet(self) -> None:
        """Returns when all ranks have called it. No step issues such a collective: ranks of which
        some are in a step and others here wait for each other, and are not given each other's
        messages, at which Gloo would end the processes if they are of different sizes."""
        if self.world_size == 1:
            self._check()
            return
        with self._failures("barrier"), self.waiting:
            self._live_backend.host_group.barrier(BarrierOptions()).wait()

    def exchange(self, payload: bytes) -> list[bytes]:
        """Sends `payload` to all ranks and returns everybody's, in rank order. Two all-gathers:
        lengths, then bytes. Where few ranks have more than a megabyte to say, broadcasts: the
        second would pad all messages to the longest."""
        lengths = [row[0] for row in self.all_gather_integers([len(payload)])]
        longest = max(lengths)
        if longest == 0:
            return [b""] * self.world_size
        if longest > 1 << 20 and 2 * sum(lengths) < longest * self.world_size:
            return [
                self._tell(payload, rank, length) if length else b""
                for rank, length in enumerate(lengths)
            ]
        padded = torch.zeros(longest, dtype=torch.uint8)
        if payload:
            padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        gathered = self._all_gather(padded)
        return [bytes(t[:n].numpy()) for t, n in zip(gathered, lengths, strict=True)]

    def _tell(self, payload: bytes, rank: int, length: int) -> bytes:
        told = torch.frombuffer(
            bytearray(payload if rank == self.rank else length), dtype=torch.uint8
        )
        self._broadcast(lambda: self._live_backend.host_group, told, rank)
        return payload if rank == self.rank else bytes(told.numpy())

    def abort(self, reason: str) -> None:
        """Ends the group: collectives that run or come later fail with `reason`. From any thread;
        returns at once."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
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
        """Gives a function that puts a socket under the group's `abort`: it is shut down then, so
        that nobody waits on it."""
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
        self.leave()

    def all_leave(self, within: timedelta = _LEAVE_WITHIN) -> None:
        """Comes before `close` or `leave` where the run is over for all ranks: has the library end
        this group and its parts in order. Does nothing unless it can
        (`CommunicationBackend.finalize`), and all ranks come within that time of each other."""
        backend = self._backend
        if self.ended or backend is None or not backend.finalizes or not backend.all_leave(within):
            return
        for wait in [
            group._backend.finalize() for group in self._with_parts() if group._backend is not None
        ]:
            wait()

    def leave(self) -> None:
        """Closes the group without telling the other ranks where the backend need not: they fail
        when they need this rank, and not before."""
        with self._lock:
            self._reason = self._reason or "this rank has left it"
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
        if self._reason is not None:
            backend = self._backend
            if backend is not None:
                backend.rest()  # who is told so may give the memory to something else
            raise self._ended(
                MembershipChanged(f"generation {self.generation.number} is over: {self._reason}")
            )

    @property
    def _live_backend(self) -> CommunicationBackend:
        if self._backend is None:
            raise MembershipChanged(f"generation {self.generation.number} is over: {self._reason}")
        return self._backend

    def _failures(self, what: str) -> _Failures:
        return _Failures(self, what)

    def _over(self, what: str, error: Exception) -> ShoalError:
        """What to raise for `error` of a collective: it ends the group."""
        reason = self._reason or f"{what} failed: {cause_of(error)}"
        # closes the sockets, so that peers stuck in the same collective are freed as well
        self.abort(reason)
        return self._ended(
            MembershipChanged(f"generation {self.generation.number} is over: {reason}")
        )

    def _ended(self, error: MembershipChanged) -> ShoalError:
        """What to raise for `error`, with which the group ended: if a rank found that their scripts
        went different ways, that."""
        verdict = self.waiting.verdict
        return error if verdict is None else PreconditionError(verdict, reason="RANKS_DIVERGED")


class _Failures:
    """Put around a collective: what it fails with ends the group, and is raised as one of Shoal's
    errors. A class and no generator, which takes three times as long: each step enters several."""

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
            # the backend has said by itself that its group is over: so is this one
            group.abort(str(error))
            if group.waiting.verdict is not None:
                raise group._ended(error) from error
        elif isinstance(error, _FAILURES) and not isinstance(error, ShoalError):
            raise group._over(self._what, error) from error


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # its peer has closed it
        # SSLSocket's own would have another thread go on in plain text
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
