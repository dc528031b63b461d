"""Interface of communication backends: collectives over a process group that can be aborted at any
time.

A backend is a thin layer over a real `torch.distributed.ProcessGroup` (`process_group`), so torch's
own parallel code runs on it. It does not touch torch's default group. A process can have several
backends, such as one per generation, and can drop any of them without side effects.

Backends make no membership decisions. A group lasts until its first failure; then it is aborted,
and a new group is initialized.

Threads: one thread issues the collectives, in the same order on all ranks. `abort` may be called
from any thread at any time, and releases the issuing thread if it is waiting. `initialize` and
`shutdown` are called by the issuing thread.
"""

from __future__ import annotations

import abc
import enum
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Final

import torch
import torch.distributed as dist
from shoal_common.errors import (
    ConfigurationError,
    InvalidRequestError,
    MembershipChanged,
    PreconditionError,
)
from torch.distributed import (
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    DistBackendError,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
)

from shoal_worker.backends.waits import Waits
from shoal_worker.torch_internals import AllgatherOptions

# ------------------------------------------------------------------------------------------- errors
#
# The error that a collective raises when its group has ended (both an error of Shoal and an error
# of torch), and a function that shortens libraries' errors.

_WHERE: Final = re.compile(
    r"^(Got the following error when running the callback: \w+: )?(\[[^\]]*\] )?"
)


class GroupEndedError(MembershipChanged, DistBackendError):
    """The group has ended: it was aborted, a peer disconnected, or a collective exceeded the
    group's timeout."""


def cause_of(error: Exception) -> str:
    """Returns the message of an error raised by a library, without source locations and advice."""
    first_line = _WHERE.sub("", str(error).strip().partition("\n")[0])
    return re.split(r"[.,;]? This is typically", first_line)[0] or type(error).__name__


# -------------------------------------------------------------------------------------- the backend

DEFAULT_TIMEOUT: Final = timedelta(seconds=300)
DEFAULT_CONNECT_TIMEOUT: Final = timedelta(seconds=5)


class ReduceOp(enum.Enum):
    """Operation that reduces the values of several ranks to one value."""

    SUM = "sum"
    AVERAGE = "average"
    """Mean across ranks; floating-point and complex tensors only."""
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"


_TORCH_OPS: Final = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVERAGE: dist.ReduceOp.AVG,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
}


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Amount of data sent on a connection since it was opened, and time spent sending it."""

    acknowledged_bytes: int
    busy_s: float
    """Number of seconds during which the connection has had unsent or unacknowledged data."""


class Handle:
    """Handle of an issued collective.

    A collective is never retried: if it fails, its group ends. Only the thread that issued the
    collective may use the handle.
    """

    def __init__(
        self,
        work: dist.Work,
        *,
        finish: Callable[[], None] | None,
        failed: Callable[[RuntimeError], None],
    ) -> None:
        """`finish`: function called once `work` has completed. `failed`: function called with the
        error if `work` fails; it may raise a different error."""
        self._work: dist.Work | None = work
        self._failure: str | None = None
        self._finish = finish
        self._failed = failed

    def wait(self) -> None:
        """Blocks until the result has arrived. May be called again. Raises MembershipChanged if the
        group has failed."""
        if self._failure is not None:
            raise PreconditionError(f"this collective failed at an earlier wait: {self._failure}")
        # The handle always drops the work, which would keep the sockets of its group open.
        work, self._work = self._work, None
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                # Only the text is kept: through its traceback, the error itself would refer to this
                # handle and to the group.
                self._failure = str(error)
                del work
                self._failed(error)
                raise
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def is_completed(self) -> bool:
        """Returns whether `wait` would return or raise immediately."""
        return self._work is None or bool(self._work.is_completed())


def _nothing() -> None:
    """Does nothing. Used as the result of `finalize` by backends whose library needs no orderly
    shutdown."""


class CommunicationBackend(abc.ABC):
    """Collectives within one group of ranks.

    All ranks of the group must issue the same collectives in the same order, with tensors of the
    same shape and dtype. Tensors must be contiguous; results are written in place. Each collective
    returns a `Handle`, which is already complete unless `async_op` is True.

    Collectives raise MembershipChanged if the group has failed or has been aborted,
    PreconditionError if the backend is not initialized, and InvalidRequestError for invalid
    arguments (before anything is sent).
    """

    name: ClassVar[str]
    """Name of the backend for users: "gloo", "nccl"."""
    device_type: ClassVar[str] = "cpu"
    """Type of device that the tensors of collectives must be on."""
    averages_natively: ClassVar[bool]
    """True if the library supports AVERAGE. Otherwise the backend sums and then divides."""
    finalizes: ClassVar[bool] = False
    """True if `finalize` does anything."""

    def __init__(self) -> None:
        self.waits = Waits()
        """Records how long this rank waits for collectives. May be replaced before `initialize`."""
        self._process_group: dist.ProcessGroup | None = None
        self._rank = -1
        self._world_size = 0
        self._members: Sequence[int] | None = None
        self._reason: str | None = None
        """Reason why the group has ended. Written once, under the lock."""
        self._lock = threading.Lock()

    # --- life

    @property
    def rank(self) -> int:
        """Rank of this process in the group, from 0; -1 before `initialize`."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks; 0 before `initialize`."""
        return self._world_size

    @property
    def is_initialized(self) -> bool:
        """True if collectives can be issued: initialized, and neither aborted nor shut down."""
        return self._process_group is not None and self._reason is None

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Underlying torch process group.

        References to it must not outlive the backend: the group's sockets close with the last
        reference. When the group is aborted, all waits on it raise MembershipChanged.
        """
        if self._reason is not None:
            raise GroupEndedError(self._reason)
        if self._process_group is None:
            raise PreconditionError(
                f"backend {self.name!r} is not initialized: call initialize() first",
                reason="BACKEND_NOT_INITIALIZED",
            )
        return self._process_group

    @property
    def host_group(self) -> dist.ProcessGroup:
        """Process group for CPU tensors. It is `process_group` itself, or a second group if
        `process_group` works on device tensors."""
        return self.process_group

    def traffic(self) -> dict[str, Traffic]:
        """Returns the traffic of the group's connections by peer address; empty if unknown."""
        return {}

    def initialize(
        self,
        *,
        rank: int,
        world_size: int,
        store: Store,
        timeout: timedelta = DEFAULT_TIMEOUT,
        connect_timeout: timedelta = DEFAULT_CONNECT_TIMEOUT,
        hostname: str | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        """Connects to the other ranks through `store`, which no other group may have used. Must be
        called once on every rank. Returns when all ranks are connected.

        Args:
            timeout: time limit of each later collective.
            connect_timeout: time limit of connecting.
            hostname: this process's address or host name for its peers; None: the address of the
                interface that reaches the store.
            members: if the group contains only some of the run's ranks, their ranks in the run,
                ordered by rank in the group; otherwise None. Used only by MPI, which forms its
                groups from its own world.

        Raises:
            PreconditionError: this backend was initialized or aborted before.
            MembershipChanged: `abort` was called on this backend or on the store, or a peer
                disconnected.
            DeadlineError: a peer did not connect within `connect_timeout`.
            ConfigurationError: invalid values.
        """
        if self._process_group is not None or self._reason is not None:
            raise PreconditionError(
                f"backend {self.name!r} is already initialized: create a new backend for each "
                "group",
                reason="BACKEND_ALREADY_INITIALIZED",
            )
        if not 0 <= rank < world_size:
            raise ConfigurationError(
                f"rank={rank} with world_size={world_size}: expected 0 <= rank < world_size"
            )
        for field, value in (("timeout", timeout), ("connect_timeout", connect_timeout)):
            if value <= timedelta(0):
                raise ConfigurationError(f"{field}={value}: expected more than 0 s")
        self._rank, self._world_size, self._members = rank, world_size, members
        group = self._connect(store, timeout, connect_timeout, hostname)
        with self._lock:
            self._process_group = group
            given_up = not self.is_initialized
        if given_up:
            self._release()
            raise GroupEndedError(self._reason or "given up")

    def comes_from(self, whole: CommunicationBackend, part: int) -> None:  # noqa: B027
        # most libraries cannot split groups
        """Declares that this group results from dividing the group `whole` into parts that together
        contain all its ranks. `part`: index of this group among the parts. Must be called before
        `initialize`. A library that can split groups then splits `whole` instead of connecting a
        new group."""

    def abort(self, reason: str) -> None:
        """Aborts the group: pending and later collectives raise GroupEndedError(reason),
        immediately on this rank and soon on all peers. Callable from any thread; returns
        immediately. Later calls do not change the reason. Does not release the group's resources;
        see `shutdown`."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
        self._break()

    def shutdown(self) -> None:
        """Aborts the group and releases its sockets and threads. Waits only if a device still uses
        the group's memory. Idempotent."""
        self.abort(f"backend {self.name!r} was shut down")
        self._release()

    def all_leave(self, within: timedelta) -> bool:
        """Waits for at most `within` until all ranks of the group have called this method and have
        no pending work. Returns True if they have. A rank that does not hear from all others in
        time returns False, even if the call returns True on other ranks."""
        return False

    def finalize(self) -> Callable[[], None]:
        """Starts the orderly shutdown of the group that the backend's library provides. Must be
        called after `all_leave`. Returns immediately, with a function that waits until the shutdown
        is complete or has been abandoned. `shutdown` must be called after that function."""
        return _nothing

    @abc.abstractmethod
    def _connect(
        self, store: Store, timeout: timedelta, connect_timeout: timedelta, hostname: str | None
    ) -> dist.ProcessGroup:
        """Creates this rank's process group. Must return or raise soon after `abort`."""

    @abc.abstractmethod
    def _break(self) -> None:
        """Makes all waits on the group fail, even while it connects. Called from any thread; must
        not block."""

    @abc.abstractmethod
    def _release(self) -> None:
        """Drops the last references to the group. Idempotent."""

    @abc.abstractmethod
    def _is_broken(self, error: RuntimeError) -> bool:
        """Returns whether an error of a collective means that the group has failed. Returns False
        if the error was caused by an invalid argument."""

    # --- collectives

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False
    ) -> Handle:
        """Reduces `tensor` across all ranks, in place, on every rank."""
        group = self._checked("all_reduce", tensor, op=op)
        options = AllreduceOptions()
        options.reduceOp = self._torch_op(op)
        return self._handle(
            "all_reduce",
            lambda: group.allreduce([tensor], options),
            async_op,
            self._average(op, tensor),
        )

    def all_reduce_short(self, tensor: torch.Tensor) -> None:
        """Sums a tensor of a few hundred bytes across all ranks, in place. Blocks. The result is
        bitwise the same on every rank.

        The training thread waits for such a sum in each step, so the backend uses its fastest path.
        Also raises PreconditionError (RANKS_DIVERGED) if another rank has issued a different sum;
        the caller must then abort the group.
        """
        self.all_reduce(tensor)

    def sum_numbers(self, values: Sequence[float]) -> list[float]:
        """Sums a few dozen numbers across all ranks, in float64, and returns the sums. Blocks, and
        raises the same errors as `all_reduce_short`."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device_type)
        self.all_reduce_short(tensor)
        summed: list[float] = tensor.tolist()
        return summed

    def all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False
    ) -> Handle:
        """Writes the `tensor` of every rank into `output`, in rank order. `output` has world_size
        times as many elements as `tensor`."""
        group = self._checked("all_gather", output, tensor)
        self._check_parts("all_gather", "output", output, "tensor", tensor)
        return self._handle(
            "all_gather",
            lambda: group.all_gather_single(output.view(-1), tensor.view(-1), AllgatherOptions()),
            async_op,
        )

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        async_op: bool = False,
    ) -> Handle:
        """Reduces `tensor` across all ranks and writes this rank's part of the result into
        `output`. `tensor` consists of world_size parts in rank order."""
        group = self._checked("reduce_scatter", output, tensor, op=op)
        self._check_parts("reduce_scatter", "tensor", tensor, "output", output)
        options = ReduceScatterOptions()
        options.reduceOp = self._torch_op(op)
        flat = output.view(-1), tensor.view(-1)
        return self._handle(
            "reduce_scatter",
            lambda: group.reduce_scatter_single(*flat, options),
            async_op,
            self._average(op, output),
        )

    def broadcast(self, tensor: torch.Tensor, source: int, *, async_op: bool = False) -> Handle:
        """Copies `tensor` of rank `source` into `tensor` of every other rank."""
        group = self._checked("broadcast", tensor)
        options = BroadcastOptions()
        options.rootRank = self._checked_rank("broadcast", "source", source)
        return self._handle("broadcast", lambda: group.broadcast([tensor], options), async_op)

    def scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor | None,
        source: int,
        *,
        async_op: bool = False,
    ) -> Handle:
        """Writes this rank's part of the `tensor` of rank `source` into `output`. On rank `source`,
        `tensor` consists of world_size parts; on other ranks it is None."""
        options = ScatterOptions()
        options.rootRank = self._checked_rank("scatter", "source", source)
        if (tensor is not None) != (self.rank == source):
            raise InvalidRequestError(
                f"scatter on rank {self.rank}: "
                + (
                    "tensor is missing; the source rank must pass it"
                    if tensor is None
                    else f"tensor was passed, but only rank {source} may pass it"
                )
            )
        group = self._checked("scatter", output, *([] if tensor is None else [tensor]))
        parts: list[list[torch.Tensor]] = []
        if tensor is not None:
            self._check_parts("scatter", "tensor", tensor, "output", output)
            parts = [[part.view_as(output) for part in tensor.view(self.world_size, -1)]]
        return self._handle("scatter", lambda: group.scatter([output], parts, options), async_op)

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Handle:
        """Sends part j of `tensor` to rank j and receives part i of `output` from rank i.

        `output_sizes`, `input_sizes`: number of rows (first dimension) per rank; None: equal parts.
        """
        group = self._checked("all_to_all", output, tensor)
        received = self._checked_sizes("output_sizes", output_sizes, output)
        sent = self._checked_sizes("input_sizes", input_sizes, tensor)
        return self._handle(
            "all_to_all",
            lambda: group.all_to_all_single(output, tensor, received, sent, AllToAllOptions()),
            async_op,
        )

    def send(
        self, tensor: torch.Tensor, destination: int, tag: int = 0, *, async_op: bool = False
    ) -> Handle:
        """Sends `tensor` to one rank, which must call `recv` with the same tag. The peer must
        receive messages of blocking sends in the order in which they are sent."""
        group = self._checked("send", tensor)
        peer = self._checked_peer("send", "destination", destination)
        return self._handle("send", lambda: group.send([tensor], peer, tag), async_op)

    def recv(
        self, tensor: torch.Tensor, source: int, tag: int = 0, *, async_op: bool = False
    ) -> Handle:
        """Receives into `tensor` a message that rank `source` sends with the same tag."""
        group = self._checked("recv", tensor)
        peer = self._checked_peer("recv", "source", source)
        return self._handle("recv", lambda: group.recv([tensor], peer, tag), async_op)

    def barrier(self, *, async_op: bool = False) -> Handle:
        """Returns a handle that completes once all ranks have called this method."""
        group = self.process_group
        return self._handle("barrier", lambda: group.barrier(BarrierOptions()), async_op)

    # --- results in the order of a device

    def order(self, work: dist.Work) -> None:
        """Makes the calling thread's later computations run after `work`, a collective of this
        group.

        The thread itself waits only if it computes on the host. Otherwise it continues, and the
        operations that it queues on the device run after the collective. This is also true if the
        collective was aborted, in which case its result is undefined. Until `settle` has returned,
        values derived from the result must therefore not be kept, sent to another rank or used as
        indices. Raises the same errors as `Handle.wait`.
        """
        work.wait()

    @property
    def unsettled(self) -> bool:
        """True if there are works passed to `order` that `settle` has not checked yet."""
        return False

    def settle(self) -> None:
        """Blocks until all works passed to `order` have completed. Raises MembershipChanged if one
        has failed; by then, the group has stopped writing to memory."""
        if self._reason is not None:
            raise GroupEndedError(self._reason)

    def rest(self) -> None:  # noqa: B027
        # on the host, waiting for each collective suffices
        """Blocks until the group, which must have ended, no longer reads or writes memory on a
        device."""

    # --- checks

    def _handle(
        self,
        what: str,
        issue: Callable[[], dist.Work],
        async_op: bool,
        finish: Callable[[], None] | None = None,
    ) -> Handle:
        def raise_if_lost(error: RuntimeError) -> None:
            if self._is_broken(error):
                self.abort(f"{what} on rank {self.rank} of {self.world_size} failed: {error}")
                raise GroupEndedError(self._reason or str(error)) from error

        try:
            handle = Handle(issue(), finish=finish, failed=raise_if_lost)
        except RuntimeError as error:
            raise_if_lost(error)
            raise
        if not async_op:
            handle.wait()
        return handle

    def _torch_op(self, op: ReduceOp) -> dist.ReduceOp:
        known = ReduceOp.SUM if op is ReduceOp.AVERAGE and not self.averages_natively else op
        return dist.ReduceOp(_TORCH_OPS[known])

    def _average(self, op: ReduceOp, tensor: torch.Tensor) -> Callable[[], None] | None:
        if op is not ReduceOp.AVERAGE or self.averages_natively:
            return None

        def divide() -> None:
            tensor.div_(self.world_size)

        return divide

    def _checked(
        self, what: str, *tensors: torch.Tensor, op: ReduceOp | None = None
    ) -> dist.ProcessGroup:
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise InvalidRequestError(
                    f"{what} of a tensor with layout {tensor.layout}: expected a dense tensor; "
                    "pass tensor.to_dense(), or its indices and values"
                )
            if not tensor.is_contiguous():
                raise InvalidRequestError(
                    f"{what} of a non-contiguous tensor of shape {tuple(tensor.shape)}: expected "
                    "a contiguous one; pass tensor.contiguous()"
                )
            if tensor.dtype != tensors[0].dtype:
                raise InvalidRequestError(
                    f"{what}: output has dtype {tensors[0].dtype} and input {tensor.dtype}; "
                    "expected the same dtype"
                )
            if op is ReduceOp.AVERAGE and not (tensor.is_floating_point() or tensor.is_complex()):
                raise InvalidRequestError(
                    f"{what} with AVERAGE of {tensor.dtype}: expected a floating-point tensor; "
                    "use SUM and divide the result"
                )
        return self.process_group

    def _check_parts(
        self, what: str, whole_name: str, whole: torch.Tensor, part_name: str, part: torch.Tensor
    ) -> None:
        if whole.numel() != self.world_size * part.numel():
            raise InvalidRequestError(
                f"{what}: {whole_name} has {whole.numel()} elements and {part_name} has "
                f"{part.numel()}; expected world_size={self.world_size} times as many"
            )

    def _checked_rank(self, what: str, field: str, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise InvalidRequestError(
                f"{what}: {field}={rank}; expected a rank from 0 to {self.world_size - 1}"
            )
        return rank

    def _checked_peer(self, what: str, field: str, rank: int) -> int:
        if rank == self.rank:
            raise InvalidRequestError(
                f"{what}: {field}={rank} is this rank itself; expected another rank"
            )
        return self._checked_rank(what, field, rank)

    def _checked_sizes(
        self, field: str, sizes: Sequence[int] | None, tensor: torch.Tensor
    ) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else 0
        if sizes is None:
            if rows % self.world_size:
                raise InvalidRequestError(
                    f"all_to_all: {rows} rows are not divisible by world_size={self.world_size}; "
                    f"pass {field}"
                )
            return []
        if len(sizes) != self.world_size or sum(sizes) != rows or min(sizes) < 0:
            raise InvalidRequestError(
                f"all_to_all: {field}={list(sizes)}; expected {self.world_size} sizes that sum to "
                f"{rows}"
            )
        return list(sizes)
