"""A torch process group over one MPI communicator.

If the tensors of a list are adjacent in memory, MPI reads and writes that memory directly;
otherwise they are copied first. MPI determines the order of summation in its own reductions
(all-reduce, reduce). Half precision, which MPI does not support, is reduced as float32 and rounded
once. A reduce-scatter is implemented as an all-to-all, which sends half precision unchanged; each
rank then sums its parts in rank order, as with Gloo. Importing this module starts MPI.

Threads: one thread issues collectives, which complete in that thread or in works.py. Any thread may
call `abort`.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Final

import torch
from mpi4py import MPI
from shoal_common.errors import InvalidRequestError
from torch.distributed import Work

from shoal_worker.backends.base import GroupEndedError
from shoal_worker.backends.collective import (
    Collective,
    Kind,
    check_op,
    op_name,
    premultiplier,
    reduce_parts,
)
from shoal_worker.backends.mpi.works import MPIWork
from shoal_worker.backends.python_group import PythonGroup

# ------------------------------------------------------------------------------------------ buffers
#
# Tensors as MPI buffers: bytes with counts for data to be sent, typed arrays for data to be
# reduced.
#
# Parts that are adjacent in memory, such as parts of one tensor, are passed to MPI in place; others
# are copied first. Tensors are passed to MPI through DLPack: once a tensor has been converted to a
# numpy array, its memory can never be freed by resizing it, as zero3 does after each block.
# Importing this module starts MPI.

_TYPES: Final = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
_OPS: Final = {
    "SUM": MPI.SUM,
    "AVG": MPI.SUM,
    "PREMUL_SUM": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "MIN": MPI.MIN,
    "MAX": MPI.MAX,
    "BAND": MPI.BAND,
    "BOR": MPI.BOR,
    "BXOR": MPI.BXOR,
}
_OPS_OF_BOOLEANS: Final = {**_OPS, "SUM": MPI.MAX, "PRODUCT": MPI.MIN}
"""Operations on booleans, which are sent as bytes 0 or 1."""


class Packed:
    """The tensors `parts` as contiguous bytes that MPI can send or receive."""

    def __init__(self, parts: Sequence[torch.Tensor], *, filled: bool) -> None:
        """`filled`: True if the parts contain values to send; False if they will receive values."""
        if len({part.dtype for part in parts}) > 1:
            raise InvalidRequestError(
                f"parts have dtypes {[str(part.dtype) for part in parts]}; expected a single dtype"
            )
        self._parts = [part.data for part in parts]
        joined = _joined(self._parts)
        self._copied = joined is None
        self._whole = (
            torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype)
            if joined is None
            else joined
        )
        if filled and self._copied:
            for index, part in enumerate(self._parts):
                self._run(index).copy_(part.reshape(-1))

    @property
    def buffer(self) -> list[Any]:
        """All parts as one MPI buffer: bytes and their datatype."""
        return [_bytes_of(self._whole), MPI.BYTE]

    @property
    def parts_buffer(self) -> list[Any]:
        """All parts as a buffer for MPI's vector collectives: the bytes, each part's (length,
        offset) in bytes, and the datatype."""
        counts = [part.nbytes for part in self._parts]
        return [
            _bytes_of(self._whole),
            (counts, list(itertools.accumulate(counts, initial=0))[:-1]),
            MPI.BYTE,
        ]

    def set_part(self, index: int, tensor: torch.Tensor) -> None:
        """Copies `tensor` into the part at `index`."""
        run = self._run(index)
        if run.data_ptr() != tensor.data_ptr():
            run.copy_(tensor.data.reshape(-1))

    def unpack(self) -> None:
        """Copies received data into the parts."""
        if self._copied:
            for index, part in enumerate(self._parts):
                part.copy_(self._run(index).view_as(part))

    def _run(self, index: int) -> torch.Tensor:
        start = sum(part.numel() for part in self._parts[:index])
        return self._whole[start : start + self._parts[index].numel()]


class Reduced:
    """Tensor that MPI reduces with torch's `op` across `size` ranks."""

    def __init__(self, tensor: torch.Tensor, op: Any, size: int) -> None:
        if tensor.is_sparse:
            raise InvalidRequestError(
                "backend 'mpi' cannot reduce sparse tensors: create embeddings with "
                "sparse=False, or use a strategy other than ddp, or backend='gloo'"
            )
        self._tensor, self._size = tensor.data, size
        self._name = op_name(op)
        values = self._tensor.contiguous()
        if values.dtype in (torch.float16, torch.bfloat16):
            values = values.float()
        if self._name == "PREMUL_SUM":
            values = values * premultiplier(op)
        self._values = values
        booleans = values.dtype == torch.bool
        self.op = (_OPS_OF_BOOLEANS if booleans else _OPS)[self._name]
        """MPI's operation that implements torch's `op`."""
        self.buffer = (
            [_bytes_of(values), MPI.UINT8_T] if booleans else [values.view(-1), _type_of(values)]
        )

    def finish(self) -> None:
        """Writes the result into the caller's tensor."""
        if self._name == "AVG":
            self._values.div_(self._size)
        if self._values is not self._tensor:
            self._tensor.copy_(self._values)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns the parts, in this order, as one flat tensor; None if they are not adjacent in
    memory."""
    some = [part for part in parts if part.numel()]
    if not some:
        return parts[0].new_empty(0)
    expected = some[0].data_ptr()
    for part in some:
        if (
            not part.is_contiguous()
            or part.data_ptr() != expected
            or part.untyped_storage().data_ptr() != some[0].untyped_storage().data_ptr()
        ):
            return None
        expected += part.nbytes
    return some[0].as_strided((sum(part.numel() for part in some),), (1,))


def _bytes_of(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(-1).view(torch.uint8)


def _type_of(tensor: torch.Tensor) -> Any:
    try:
        return _TYPES[tensor.dtype]
    except KeyError:
        raise InvalidRequestError(f"backend 'mpi' cannot reduce {tensor.dtype}") from None


# -------------------------------------------------------------------------------- the process group

_ABORT_TAG: Final[Any] = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
"""Tag of messages that tell other ranks why the group has ended."""


@dataclass(frozen=True)
class Issued:
    """An operation issued to MPI."""

    requests: list[Any]
    """MPI's requests."""
    finish: list[Callable[[], None]] = field(default_factory=list)
    """Functions that write the result, called once the requests are complete."""
    kept: Sequence[Any] = ()
    """Objects kept alive while MPI reads from them."""


class MPIGroup(PythonGroup):
    """Process group over MPI. `communicator`: MPI communicator of the group's ranks; the group
    takes ownership."""

    backend_name: ClassVar[str] = "shoal_mpi"

    def __init__(self, communicator: Any, name: str, timeout: timedelta) -> None:
        super().__init__(communicator.rank, communicator.size, name)
        self.reason: str | None = None
        """Reason why the group has ended; None while it is usable."""
        self._comm = communicator
        self._timeout = timeout
        self._lock = threading.Lock()
        self._abort_messages: list[Any] = []
        self._pending: set[MPIWork] = set()

    def abort(self, reason: str = "the process group was aborted") -> None:
        """Aborts the group on this rank, and notifies the other ranks with a message. The group
        ends on each of them when it reads the message."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
        message = reason.encode()
        peers = [peer for peer in range(self.size()) if peer != self.rank()]
        # These messages may never be received. They are short enough to be sent without a receiver,
        # and are kept in memory as long as the group.
        self._abort_messages = [
            (message, self._comm.Isend([message, MPI.BYTE], peer, _ABORT_TAG)) for peer in peers
        ]

    def shutdown(self) -> None:
        """Releases the communicator if no operation is pending on it. Does not notify the other
        ranks. Idempotent."""
        with self._lock:
            ended, self.reason = self.reason, self.reason or "the process group was shut down"
            clean = ended is None and not any(not work.is_completed() for work in self._pending)
        if clean:
            self._comm.Free()

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of later waits for other ranks."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """Time limit of a wait for other ranks."""
        return self._timeout

    def check_live(self) -> None:
        """Raises GroupEndedError if the group has ended on this rank, or if another rank has
        reported its end."""
        if self.reason is None:
            status = MPI.Status()
            # probes and receives in one call, because another thread may probe too
            message_waiting = self._comm.Improbe(MPI.ANY_SOURCE, _ABORT_TAG, status)
            if message_waiting is not None:
                message = bytearray(status.Get_count(MPI.BYTE))
                message_waiting.Recv([message, MPI.BYTE])
                with self._lock:
                    self.reason = self.reason or message.decode()
        if self.reason is not None:
            raise GroupEndedError(self.reason)

    def finished(self, work: MPIWork) -> None:
        """Records that MPI has completed a work. Called once per work."""
        self._pending.discard(work)

    # --- issuing

    def _issue(self, call: Collective) -> Work:
        self.check_live()
        if any(one.device.type != "cpu" for one in (*call.inputs, *call.outputs)):
            raise InvalidRequestError(f"{call}: backend 'mpi' supports only CPU tensors")
        for one in call.inputs if call.op is not None else ():
            check_op(call.op, one.dtype)
        return self._work(str(call), _ISSUE[call.kind](self._comm, call), call.result)

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        self.check_live()
        packed = Packed([tensor], filled=True)
        return self._work(
            f"send to rank {peer}",
            Issued([self._comm.Isend(packed.buffer, peer, tag)], [], [packed]),
            [tensor],
        )

    def _receive(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Work:
        self.check_live()
        packed = Packed([tensor], filled=False)
        request = self._comm.Irecv(packed.buffer, MPI.ANY_SOURCE if peer is None else peer, tag)
        return self._work(
            f"recv from {'any rank' if peer is None else f'rank {peer}'}",
            Issued([request], [packed.unpack]),
            [tensor],
        )

    def _work(self, what: str, issued: Issued, result: list[Any]) -> MPIWork:
        work = MPIWork(what, self, issued.requests, issued.finish, issued.kept, result)
        self._pending.add(work)
        return work


def _all_reduce(comm: Any, call: Collective) -> Issued:
    reduced = [Reduced(one, call.op, comm.size) for one in call.inputs]
    return Issued(
        [comm.Iallreduce(MPI.IN_PLACE, one.buffer, one.op) for one in reduced],
        [one.finish for one in reduced],
    )


def _reduce(comm: Any, call: Collective) -> Issued:
    reduced = [Reduced(one, call.op, comm.size) for one in call.inputs]
    if comm.rank != call.root:
        return Issued(
            [comm.Ireduce(one.buffer, None, one.op, call.root) for one in reduced], kept=reduced
        )
    return Issued(
        [comm.Ireduce(MPI.IN_PLACE, one.buffer, one.op, call.root) for one in reduced],
        [one.finish for one in reduced],
    )


def _broadcast(comm: Any, call: Collective) -> Issued:
    packed = [Packed([one], filled=comm.rank == call.root) for one in call.inputs]
    return Issued(
        [comm.Ibcast(one.buffer, call.root) for one in packed], [one.unpack for one in packed]
    )


def _all_gather(comm: Any, call: Collective) -> Issued:
    gathered = []
    for index, one in enumerate(call.inputs):
        parts = call.outputs[index * comm.size : (index + 1) * comm.size]
        if parts[comm.rank].nbytes != one.nbytes:
            raise InvalidRequestError(
                f"{call}: this rank's part of the output holds {parts[comm.rank].nbytes} bytes, "
                f"but its input {one.nbytes}; expected equal sizes"
            )
        packed = Packed(parts, filled=False)
        packed.set_part(comm.rank, one)
        gathered.append(packed)
    return Issued(
        [comm.Iallgatherv(MPI.IN_PLACE, one.parts_buffer) for one in gathered],
        [one.unpack for one in gathered],
    )


def _reduce_scatter(comm: Any, call: Collective) -> Issued:
    issued = Issued([], [], [])
    for index, output in enumerate(call.outputs):
        sent = Packed(call.inputs[index * comm.size : (index + 1) * comm.size], filled=True)
        parts = output.data.new_empty((comm.size, *output.shape)).unbind(0)
        received = Packed(parts, filled=False)
        issued.requests.append(comm.Ialltoallv(sent.parts_buffer, received.parts_buffer))
        issued.finish.append(functools.partial(_reduce_into, output, parts, call.op, sent))
    return issued


def _reduce_into(
    output: torch.Tensor, parts: Sequence[torch.Tensor], op: Any, _sent: Packed
) -> None:
    output.data.copy_(reduce_parts(parts, op))


def _gather(comm: Any, call: Collective) -> Issued:
    sent = Packed(call.inputs, filled=True)
    if comm.rank != call.root:
        return Issued([comm.Igatherv(sent.buffer, None, call.root)], kept=[sent])
    received = Packed(call.outputs, filled=False)
    return Issued(
        [comm.Igatherv(sent.buffer, received.parts_buffer, call.root)], [received.unpack], [sent]
    )


def _scatter(comm: Any, call: Collective) -> Issued:
    received = Packed(call.outputs, filled=False)
    if comm.rank != call.root:
        return Issued([comm.Iscatterv(None, received.buffer, call.root)], [received.unpack])
    sent = Packed(call.inputs, filled=True)
    return Issued(
        [comm.Iscatterv(sent.parts_buffer, received.buffer, call.root)], [received.unpack], [sent]
    )


def _all_to_all(comm: Any, call: Collective) -> Issued:
    sent, received = Packed(call.inputs, filled=True), Packed(call.outputs, filled=False)
    return Issued(
        [comm.Ialltoallv(sent.parts_buffer, received.parts_buffer)], [received.unpack], [sent]
    )


def _barrier(comm: Any, call: Collective) -> Issued:
    return Issued([comm.Ibarrier()])


_ISSUE: Final[dict[Kind, Callable[[Any, Collective], Issued]]] = {
    Kind.ALL_REDUCE: _all_reduce,
    Kind.REDUCE: _reduce,
    Kind.BROADCAST: _broadcast,
    Kind.ALL_GATHER: _all_gather,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.GATHER: _gather,
    Kind.SCATTER: _scatter,
    Kind.ALL_TO_ALL: _all_to_all,
    Kind.BARRIER: _barrier,
}
