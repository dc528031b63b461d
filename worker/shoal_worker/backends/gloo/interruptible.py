"""A Gloo process group that can be aborted while its collectives wait.

Breaking a group's connections does not end all waits on them. When a connection breaks in the
middle of a message, Gloo (in Pair::signalException) notifies the operations queued before and after
that message, but not the operation that is transferring it. That operation sleeps until the group's
timeout. Callers therefore wait for Shoal's work instead of Gloo's. Shoal's work completes with
Gloo's work or, regardless of Gloo, a short delay after `abort`. During this delay, the operations
that were notified can end; until then, they may write to their tensors. An operation that sleeps
(native_threads.py) never writes again. It sleeps until its timeout, and the group is destroyed
afterwards.

Point-to-point transfers are interrupted in the same way (works.Transfer). Sums of a few numbers
bypass Gloo (short_sums.py).

Threads: one thread issues collectives, which complete in Gloo's threads. Any thread may call
`abort`."""

from __future__ import annotations

import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

import torch
import torch.distributed as dist
from shoal_common.errors import InternalError, ShoalError
from torch.distributed import BroadcastOptions, ReduceScatterOptions, Work

from shoal_worker.backends import native_threads
from shoal_worker.backends.base import GroupEndedError, Traffic, cause_of
from shoal_worker.backends.collective import check_op, reduce_parts
from shoal_worker.backends.gloo import on_devices
from shoal_worker.backends.gloo.forming import GlooGroup
from shoal_worker.backends.gloo.works import AllOf, InterruptibleWork, Transfer, Waiter, end_works
from shoal_worker.backends.python_group import ForwardingGroup
from shoal_worker.backends.sparse_sum import SparseSum
from shoal_worker.backends.waits import Waits
from shoal_worker.scratch import ScratchMemory, in_host_memory
from shoal_worker.torch_internals import AllgatherOptions, native_collective

# ------------------------------------------------------------------------------ memory that is kept
#
# Buffers for collectives, which are kept between calls.
#
# The kernel must clear newly allocated pages: for 64 MiB, this takes longer than receiving the data
# (docs/explanation/backends.md#gloo-faster-collectives). A few buffers are therefore kept as long
# as their group. They may be used from any thread.


_MOST_SCRATCH: Final = 2
"""Number of memory blocks that are kept, because at most two collectives of the same kind
overlap."""


# -------------------------------------------------------------------------------- the process group

_MANY: Final = 64
_WORKS_END_S: Final = 60.0
"""Maximum time to wait for `end_works`, which normally returns much earlier."""

_open: weakref.WeakSet[InterruptibleGroup] = weakref.WeakSet()
"""Groups that have not been shut down. They are shut down at the interpreter's exit."""

BROADCASTS_FROM_BYTES: Final = 1 << 18
"""Minimum size of the gathered result, in bytes, for replacing an all-gather with broadcasts or an
exchange (docs/explanation/backends.md#gloo-faster-collectives)."""

_Numbers = TypeVar("_Numbers")
_Sum = TypeVar("_Sum")


class InterruptibleGroup(ForwardingGroup):
    """Issues collectives on a native group. Owns the native group and its connections.

    `ended`: function called once with the reason, from any thread, when the group ends because of
    `abort` or a failed collective.
    """

    backend_name: ClassVar[str] = "shoal_gloo"

    def __init__(
        self,
        formed: GlooGroup,
        ended: Callable[[str], None] | None = None,
        waits: Waits | None = None,
    ) -> None:
        """`formed`: the connected native group. `ended`: see the class. `waits`: records how long
        this rank waits for collectives."""
        native, sockets, sums = formed.process_group, formed.sockets, formed.sums
        super().__init__(native.rank(), native.size(), native.group_name)
        self.waits = waits or Waits()
        self.timeout = formed.timeout
        """Time limit of a send or receive. (Gloo itself would use the connect timeout.)"""
        self.reason: str | None = None
        """Reason why the group has ended; None while it is usable."""
        self._native: dist.ProcessGroup | None = native
        self._sockets = sockets
        self._sums = sums
        self._ended = ended
        self._unfinished: set[InterruptibleWork | Transfer] = set()
        """Works that Gloo may not have finished."""
        self._shut_down = False
        self._idle = threading.Event()
        """Set once the group has been shut down and Gloo has no pending work."""
        self._works_ended = threading.Event()
        """Set once the group has been aborted and its pending works have ended."""
        self._lock = threading.Lock()
        """Guards the reason, the unfinished works, and whether the group has been shut down."""
        self._scratch = ScratchMemory(most=_MOST_SCRATCH)
        self._closer = weakref.finalize(self, formed.close)
        self.waiter = Waiter()
        weakref.finalize(self, self.waiter.close)
        _open.add(self)

    def watch(self) -> None:
        """Starts watching the connections to the peers: the group is aborted when one of them is
        closed."""
        reference = weakref.ref(self)

        def lost(what: str) -> None:
            group = reference()
            if group is not None:
                group.abort(what)

        self._sockets.watch(lost)

    def abort(self, reason: str = "the process group was aborted") -> None:
        """Aborts the group: pending and later works raise GroupEndedError(reason), immediately on
        this rank and soon on the peers. Callable from any thread."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            unfinished = [work for work in self._unfinished if not work.native_completed]
        self._sockets.shut_down()
        if self._sums is not None:
            self._sums.shut_down()
        if unfinished:
            native_threads.start(
                partial(self._end_works, unfinished, reason), name="shoal-gloo-abort"
            )
        else:
            self._works_ended.set()
        if self._ended is not None:
            self._ended(reason)

    def _end_works(self, works: Sequence[InterruptibleWork | Transfer], reason: str) -> None:
        try:
            end_works(works, reason, self._sockets.drain)
        finally:
            self._works_ended.set()

    def await_end(self) -> None:
        """Blocks after an abort until all pending works have ended and Gloo has stopped writing to
        their tensors."""
        if not self._works_ended.wait(_WORKS_END_S):
            raise InternalError(
                f"collectives of an aborted group did not end within {_WORKS_END_S:g} s"
            )

    def traffic(self) -> dict[str, Traffic]:
        """Implements `GroupSockets.traffic`."""
        return self._sockets.traffic()

    def shutdown(self) -> None:
        """Aborts the group and releases it. If Gloo has unfinished work, the native group is kept
        until that work has ended, without blocking the caller. Idempotent."""
        self.abort("the process group was shut down")
        _open.discard(self)
        self._closer()
        self.waiter.close()
        references: list[object] = [self._native]
        self._native = None
        if references[0] is None:
            return
        with self._lock:
            self._shut_down = True
            unfinished = self._unfinished = {
                work for work in self._unfinished if not work.native_completed
            }
            if not unfinished:
                self._idle.set()
        for work in list(unfinished):
            work.follow()
        native_threads.drop(references, when=self._idle)

    # When a collective has completed, torch's Gloo stores its name in one string per group, from
    # two threads and without a lock (ProcessGroupGloo::runLoop in torch 2.13 and 2.14). A name of
    # more than 15 characters needs allocated memory, which two threads may then free twice or
    # overwrite after it was freed. So the collectives with such names, which are those of coalesced
    # and sparse tensors, are made of others.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Implements `ProcessGroup.allreduce`, for sparse tensors as well; interruptible."""
        if len(tensors) == 1 and tensors[0].is_sparse:
            entries = SparseSum(self, tensors[0], opts)
            arguments = (entries.gathered, entries.packed, AllgatherOptions())
            return self._issue("all_gather_single", arguments, {}, entries.write)
        return self._issue("allreduce", (tensors,) if opts is None else (tensors, opts), {})

    def allgather_coalesced(
        self,
        output_lists: list[list[torch.Tensor]],
        input_list: list[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        """Implements `ProcessGroup.allgather_coalesced`; interruptible. The outputs are one list
        per rank, with one tensor per input."""
        by_input = zip(*output_lists, strict=True)
        return AllOf(
            [
                self.allgather([list(parts)], [one], opts)
                for parts, one in zip(by_input, input_list, strict=True)
            ],
            output_lists,
        )

    def all_gather_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        """Implements `ProcessGroup.all_gather_single_coalesced`; interruptible."""
        return AllOf(
            [
                self.all_gather_single(output, one, opts)
                for output, one in zip(outputs, inputs, strict=True)
            ],
            outputs,
        )

    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced

    # Gloo's all-gather passes parts around a ring, one step after another. Simultaneous broadcasts
    # from all ranks send the same number of bytes, and none waits for another. Between two ranks,
    # an exchange is one collective instead of two.

    def allgather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        """Implements `ProcessGroup.allgather`; interruptible."""
        if len(inputs) != 1 or not self._gathers_at_once(outputs[0], inputs[0]):
            return self._issue("allgather", (outputs, inputs, opts or AllgatherOptions()), {})
        return self._gather_at_once(outputs[0], inputs[0], outputs)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: AllgatherOptions | None = None
    ) -> Work:
        """Implements `ProcessGroup.all_gather_single`; interruptible."""
        parts = (
            output.view(self.size(), -1).unbind(0)
            if output.is_contiguous() and output.numel() % self.size() == 0
            else []
        )
        if not self._gathers_at_once(parts, input):
            return self._issue("all_gather_single", (output, input, opts or AllgatherOptions()), {})
        return self._gather_at_once(parts, input, [output])

    _allgather_base: Any = all_gather_single

    # Gloo implements reduce-scatter as an all-reduce, after which each rank copies its part. This
    # sends twice as many bytes, and Gloo's work has no future. Here, each rank receives its parts
    # from all other ranks and sums them itself.

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: ReduceScatterOptions | None = None
    ) -> Work:
        """Implements `ProcessGroup.reduce_scatter_single`; interruptible."""
        return self._reduce_scatter([output], input.reshape(self.size(), -1), opts)

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: ReduceScatterOptions | None = None,
    ) -> Work:
        """Implements `ProcessGroup.reduce_scatter_single_coalesced`; interruptible."""
        return self._reduce_scatter(
            outputs, torch.cat([one.reshape(self.size(), -1) for one in inputs], dim=1), opts
        )

    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: ReduceScatterOptions | None = None,
    ) -> Work:
        """Implements `ProcessGroup.reduce_scatter`; interruptible. All parts must have the same
        size."""
        return self._reduce_scatter(
            outputs, torch.stack([part.reshape(-1) for part in inputs[0]]), opts
        )

    _reduce_scatter_base: Any = reduce_scatter_single
    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> Work:  # noqa: N803
        # torch's names
        """Implements `ProcessGroup.send`."""
        held = [
            on_devices.host_copy(tensor) if on_devices.is_elsewhere(tensor) else tensor
            for tensor in tensors
        ]
        return self._transfer("send", held, dstRank, tag)

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> Work:  # noqa: N803
        # torch's names
        """Implements `ProcessGroup.recv`."""
        return self._receive("recv", tensors, srcRank, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work:
        """Implements `ProcessGroup.recv_anysource`."""
        return self._receive("recv_anysource", tensors, tag)

    def all_reduce_short(self, tensor: torch.Tensor) -> None:
        """Implements `CommunicationBackend.all_reduce_short` over the separate connections of
        short_sums.py."""
        sums = self._sums
        if sums is None or not tensor.is_cpu or not sums.takes(tensor.nbytes):
            self.allreduce([tensor]).wait()
        else:
            self._sum_short(sums.all_reduce, tensor)

    def sum_numbers(self, values: Sequence[float]) -> list[float]:
        """Implements `CommunicationBackend.sum_numbers`."""
        sums, numbers = self._sums, array("d", values)
        if sums is None or not sums.takes(len(numbers) * numbers.itemsize):
            tensor = torch.frombuffer(numbers, dtype=torch.float64)
            self.allreduce([tensor]).wait()
            return numbers.tolist()
        return self._sum_short(sums.sum_numbers, numbers)

    def _sum_short(self, add_up: Callable[[_Numbers], _Sum], mine: _Numbers) -> _Sum:
        self._live()
        try:
            with self.waits.of("all_reduce"):
                return add_up(mine)
        except OSError as error:
            self.abort(
                f"all_reduce on rank {self.rank()} of {self.size()} failed: {cause_of(error)}"
            )
            raise GroupEndedError(str(self.reason)) from error
        except ShoalError:
            raise  # the caller notifies the other ranks and then aborts the group
        except BaseException:
            self.abort("a sum was interrupted")  # the next sum would read the rest of this one
            raise

    # Methods that torch expects of a process group written in Python.

    @property
    def _device_types(self) -> list[torch.device]:
        # DCP saves in the background only if the group accepts CPU tensors
        return self._live()._device_types

    # Tracking of collectives.

    def _gathers_at_once(self, parts: Sequence[torch.Tensor], input: torch.Tensor) -> bool:
        """Returns whether to use broadcasts or an exchange, which are faster than Gloo's own
        all-gather for large inputs. Returns False for mismatched tensors, so that Gloo refuses
        them."""
        return (
            self.size() > 1
            and self.size() * input.nbytes >= BROADCASTS_FROM_BYTES
            and len(parts) == self.size()
            and all(
                part.is_contiguous() and part.numel() == input.numel() and part.dtype == input.dtype
                for part in parts
            )
        )

    def _gather_at_once(
        self, parts: Sequence[torch.Tensor], input: torch.Tensor, value: Any
    ) -> Work:
        """All-gathers with broadcasts: writes each rank's `input` into that rank's part of the
        output, on all ranks. Copies this rank's own input while the other ranks' inputs arrive."""
        mine, given = parts[self.rank()].data, input.data
        if not given.is_contiguous():
            given = mine.copy_(given.reshape(mine.shape))
        directly = self.size() == 2 and given.is_cpu
        work = (
            self._exchange(parts, given, value)
            if directly
            else AllOf(self._broadcasts(parts, given), value)
        )
        if mine.data_ptr() != given.data_ptr():
            mine.copy_(given.view_as(mine))
        return work

    def _broadcasts(self, parts: Sequence[torch.Tensor], given: torch.Tensor) -> list[Work]:
        works = []
        for rank, part in enumerate(parts):
            options = BroadcastOptions()
            options.rootRank = rank
            works.append(
                self._issue("broadcast", ([given if rank == self.rank() else part], options), {})
            )
        return works

    def _exchange(self, parts: Sequence[torch.Tensor], given: torch.Tensor, value: Any) -> Work:
        """All-gathers between two ranks: exchanges their inputs in a single collective."""
        peer = 1 - self.rank()
        sizes = [0, 0]
        sizes[peer] = given.numel()
        return self._issue(
            "all_to_all_single",
            (parts[peer].data.view(-1), given.view(-1), sizes, sizes),
            {},
            lambda: value,
        )

    def _reduce_scatter(
        self, outputs: list[torch.Tensor], parts: torch.Tensor, opts: ReduceScatterOptions | None
    ) -> Work:
        """Issues a reduce-scatter.

        `parts`: tensor of shape (ranks, elements); row i is the part for rank i.
        `outputs`: tensors that together have the size of one row.
        """
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        check_op(op, parts.dtype)
        # a device's allocator caches memory itself, and tracks which streams still use it
        kept = in_host_memory(parts.device)
        received = (
            self._scratch.take(parts.shape, parts.dtype, parts.device)
            if kept
            else torch.empty_like(parts)
        )

        def finish() -> list[torch.Tensor]:
            columns = received.split([output.numel() for output in outputs], dim=1)
            for output, part in zip(outputs, columns, strict=True):
                into = output.data.view(-1) if output.is_contiguous() else None
                reduced = reduce_parts(part.unbind(0), op, into)
                if into is None:
                    output.data.copy_(reduced.view_as(output))
            if kept:
                self._scratch.give_back(received)
            return outputs

        rows: list[int] = []
        return self._issue(
            "all_to_all_single", (received, parts.contiguous(), rows, rows), {}, finish
        )

    def _issue(
        self,
        name: str,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        finish: Callable[[], Any] | None = None,
    ) -> Work:
        """Issues a collective.

        `finish`: function called once Gloo has completed the work; returns the value of the work's
        future.
        """
        try:
            native = native_collective(self._live(), name)(*arguments, **options)
        except RuntimeError as error:
            self.raise_if_lost(name, error)
            raise
        work = InterruptibleWork(name, native, self, finish, on_devices.order_of(arguments))
        self.issued(work)
        return work

    def issued(self, work: InterruptibleWork | Transfer) -> None:
        """Records a work that Gloo has started."""
        with self._lock:
            if len(self._unfinished) >= _MANY:
                # works that no thread has waited for
                self._unfinished = {
                    known for known in self._unfinished if not known.native_completed
                }
            if not work.native_completed:
                self._unfinished.add(work)
        if self.reason is not None:
            end_works([work], self.reason, self._sockets.drain)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Implements `ProcessGroup.monitored_barrier`; not interruptible."""
        # missing in torch's stub
        self._live().monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]

    def _receive(self, name: str, tensors: list[torch.Tensor], *arguments: int) -> Work:
        if len(tensors) == 1 and on_devices.is_elsewhere(tensors[0]):
            host = on_devices.host_memory_for(tensors[0])
            return on_devices.ArrivingElsewhere(
                self._transfer(name, [host], *arguments), host, tensors[0]
            )
        return self._transfer(name, tensors, *arguments)

    def _transfer(self, name: str, tensors: list[torch.Tensor], *arguments: int) -> Transfer:
        try:
            return Transfer(name, getattr(self._live(), name)(tensors, *arguments), self, tensors)
        except RuntimeError as error:
            self.raise_if_lost(name, error)
            raise

    def _live(self) -> dist.ProcessGroup:
        native = self._native
        if self.reason is not None or native is None:
            raise GroupEndedError(self.reason or "the process group was shut down")
        return native

    def finished(self, work: InterruptibleWork | Transfer) -> None:
        """Records that Gloo has completed a work."""
        with self._lock:
            self._unfinished.discard(work)
            if self._shut_down and not self._unfinished:
                self._idle.set()

    def loss(self, name: str, error: RuntimeError) -> str | None:
        """Returns the reason why the group has ended if `error` has ended it; all later collectives
        then fail too, and the group is aborted so that peers do not wait until their timeout.
        Returns None for other errors, such as an unsupported dtype, which leave the group
        intact."""
        if self.reason is None and "gloo/transport" in str(error):
            self.abort(f"{name} on rank {self.rank()} of {self.size()} failed: {cause_of(error)}")
        return self.reason

    def raise_if_lost(self, name: str, error: RuntimeError) -> None:
        reason = self.loss(name, error)
        if reason is not None:
            raise GroupEndedError(reason) from error


def _shut_down_all() -> None:
    """Shuts down all groups, so that none of Gloo's threads is running when the interpreter shuts
    down (see native_threads.py)."""
    for group in list(_open):
        group.shutdown()


native_threads.before_exit(_shut_down_all)
