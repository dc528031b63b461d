"""NCCL: collectives between NVIDIA GPUs, with an additional Gloo group for messages between hosts.

NCCL finds its interfaces by itself (NCCL_SOCKET_IFNAME), so `hostname` applies to the Gloo group
only. The group is bound to the current CUDA device, so torch.cuda.set_device must be called first.
The backend has not run on a GPU yet; docs/gpu.md describes what is tested without one.

The host group sends values that hosts read immediately: step votes, numbers, and messages between
steps. On the device, these would be queued behind all computations. The host group connects first,
so that NCCL starts only when all ranks are present: once NCCL is connecting, it can hardly be
stopped. The host group also notices a lost peer within a quarter of a second. NCCL often does not
notice it at all: a kernel that waits for that peer spins until it is aborted. When either group
ends, the other is aborted too.

Connecting blocks in C++, so it runs on a separate thread. The thread ends when the library returns,
after its time limit at the latest.
"""

from __future__ import annotations

import itertools
import queue
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import ClassVar, Final

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError, DeadlineError, MembershipChanged, ShoalError
from torch.distributed import BarrierOptions
from torch.distributed.distributed_c10d import Store
from typing_extensions import override

from shoal_worker.backends import native_threads
from shoal_worker.backends.base import CommunicationBackend, GroupEndedError, Traffic, cause_of
from shoal_worker.backends.gloo.backend import GlooBackend
from shoal_worker.backends.nccl.device import CudaDevice, Device, Native, Split
from shoal_worker.backends.nccl.ending import Ending
from shoal_worker.backends.nccl.group import DeviceGroup, DeviceWork, is_refusal
from shoal_worker.backends.nccl.sharing import check_own_device

CONNECT_LIMIT: Final = timedelta(seconds=60)
"""Time limit of NCCL's connecting once all ranks are present, unless connect_timeout is longer. The
first connection takes 2 to 10 s."""

_NUMBERS: Final = itertools.count()
_LOOK_S: Final = 0.02


class _HostGroup(GlooBackend):
    """Gloo group between the hosts. When it ends, it calls `ended(reason)`, which also aborts the
    device's group."""

    def __init__(self, ended: Callable[[str], None]) -> None:
        super().__init__()
        self._then = ended

    def _break(self) -> None:
        super()._break()
        self._then(self._reason or "given up")


class NCCLBackend(CommunicationBackend):
    """Backend that uses a separate `ProcessGroupNCCL`, for CUDA tensors."""

    name: ClassVar[str] = "nccl"
    device_type: ClassVar[str] = "cuda"
    averages_natively: ClassVar[bool] = True
    finalizes: ClassVar[bool] = True

    def __init__(
        self, device: Device | None = None, *, connect_limit: timedelta = CONNECT_LIMIT
    ) -> None:
        """`device`: device of the collectives; None: the current CUDA device.
        `connect_limit`: time limit of NCCL's connecting once all ranks are present.

        Raises:
            ConfigurationError: torch has no CUDA or no NCCL.
        """
        super().__init__()
        self._device: Device = device or CudaDevice()
        self._connect_limit = connect_limit
        self._ending = Ending(self._device)
        self._group: DeviceGroup | None = None
        self._comes_from: tuple[NCCLBackend, int] | None = None
        reference = weakref.ref(self)

        def ended(reason: str) -> None:
            backend = reference()
            if backend is not None:
                backend.abort(reason)

        self._ended = ended
        self._host = _HostGroup(ended)

    def _connect(
        self, store: Store, timeout: timedelta, connect_timeout: timedelta, hostname: str | None
    ) -> dist.ProcessGroup:
        self._host.waits = self.waits
        try:
            self._host.initialize(
                rank=self.rank,
                world_size=self.world_size,
                store=store,
                timeout=timeout,
                connect_timeout=connect_timeout,
                hostname=hostname,
                members=self._members,
            )
            limit = max(connect_timeout, self._connect_limit)
            split = self._split(limit)
            if self._device.blocks:
                self._ending.connects(limit)
            native = within(
                limit, lambda: self._connected(store, limit, split), given_up=lambda: self._reason
            )
            name = f"shoal_nccl_{next(_NUMBERS)}"
            self._group = DeviceGroup(
                native,
                device=self._device,
                ending=self._ending,
                name=name,
                timeout=timeout,
                ended=self._ended,
                waits=self.waits,
            )
        except BaseException as error:
            cause = error.__cause__
            if isinstance(cause, RuntimeError) and self._device.has_failed(cause):
                self._ending.failed(cause_of(cause))
            self.abort(
                "connecting failed: "
                f"{cause_of(error) if isinstance(error, Exception) else type(error).__name__}"
            )
            self._host.shutdown()
            raise
        if self._reason is not None:
            # the group ended while it was connecting, when there was nothing to break yet
            self._break()
        return self._group

    @override
    def comes_from(self, whole: CommunicationBackend, part: int) -> None:
        if isinstance(whole, NCCLBackend):
            self._comes_from = whole, part

    def _split(self, limit: timedelta) -> Split | None:
        if self._comes_from is None or not self._device.splits:
            return None
        whole, part = self._comes_from
        if whole._native is None or not whole.is_initialized:
            return None
        whole._ending.splits(limit)
        return Split(whole=whole._native, part=part)

    def _connected(self, store: Store, limit: timedelta, split: Split | None) -> dist.ProcessGroup:
        comes_from = self._comes_from
        try:
            check_own_device(self._device, store, self.rank, self.world_size)
            return self._device.connect(
                store, self.rank, self.world_size, limit, self._ending, split
            )
        finally:
            self._ending.has_connected()
            if comes_from is not None:
                comes_from[0]._ending.has_split()

    @property
    def _native(self) -> Native | None:
        return self._ending.native

    @property
    @override
    def host_group(self) -> dist.ProcessGroup:
        if self._reason is not None:
            raise GroupEndedError(self._reason)
        return self._host.process_group

    def all_reduce_short(self, tensor: torch.Tensor) -> None:
        """Implements `CommunicationBackend.all_reduce_short` over the host group. A tensor on a
        device is copied to the host, which waits for the device, and back."""
        here = tensor.cpu()
        self._host.all_reduce_short(here)
        if here is not tensor:
            tensor.copy_(here)

    def sum_numbers(self, values: Sequence[float]) -> list[float]:
        """Implements `CommunicationBackend.sum_numbers` over the host group."""
        return self._host.sum_numbers(values)

    def traffic(self) -> dict[str, Traffic]:
        """Implements `CommunicationBackend.traffic`. Only the host group reports traffic; NCCL does
        not."""
        return self._host.traffic()

    @override
    def order(self, work: dist.Work) -> None:
        if isinstance(work, DeviceWork):
            work.order()
        else:
            work.wait()

    @property
    @override
    def unsettled(self) -> bool:
        return self._group is not None and self._group.ordered.any_left

    @override
    def settle(self) -> None:
        if self._group is not None:
            self._group.settle()

    def rest(self) -> None:
        """Implements `CommunicationBackend.rest`: blocks until the abort has returned and the
        device has finished all queued operations."""
        if self._reason is not None:
            self._ending.wait()

    def all_leave(self, within: timedelta) -> bool:
        """Implements `CommunicationBackend.all_leave` with a barrier of the host group, once the
        device has finished all queued operations."""
        deadline = time.monotonic() + within.total_seconds()
        if not self._ending.at_rest(within):
            return False
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            return self.host_group.barrier(BarrierOptions()).wait(left)
        except (RuntimeError, MembershipChanged):  # a peer has disconnected, or does not leave
            return False

    def finalize(self) -> Callable[[], None]:
        """Implements `CommunicationBackend.finalize`. The host group remains open during the
        finalization, because a rank may not know yet that all ranks are leaving."""
        self._ending.finalize()
        return self._ending.wait

    def _break(self) -> None:
        group, reason = self._group, self._reason or "given up"
        if group is not None:
            group.abort(reason)
        self._host.abort(reason)
        self._ending.begin()

    def _release(self) -> None:
        group, self._group = self._group, None
        self._process_group = self._comes_from = None
        self._host.shutdown()
        if group is not None:
            group.shutdown()

    def _is_broken(self, error: RuntimeError) -> bool:
        return False  # the group itself raises MembershipChanged


def within(
    limit: timedelta,
    connect: Callable[[], dist.ProcessGroup],
    *,
    given_up: Callable[[], str | None],
) -> dist.ProcessGroup:
    """Runs `connect` on a separate thread and returns its result.

    Raises MembershipChanged if the attempt was abandoned or failed, ConfigurationError if the
    library reports a permanent problem, DeadlineError after `limit`, and other errors of `connect`.
    A result that arrives later is dropped.
    """
    answers: queue.SimpleQueue[tuple[dist.ProcessGroup | None, Exception | None]] = (
        queue.SimpleQueue()
    )

    def run() -> None:
        try:
            answers.put((connect(), None))
        except Exception as error:
            answers.put((None, error))

    native_threads.start(run, name="shoal-nccl-forming")
    deadline = time.monotonic() + limit.total_seconds()
    while given_up() is None:
        if time.monotonic() > deadline:
            raise DeadlineError(
                "all ranks arrived, but NCCL did not connect them within "
                f"{limit.total_seconds():g} s",
                reason="CONNECT_TIMEOUT",
            )
        try:
            connected, error = answers.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
        if connected is not None:
            return connected
        if given_up() is not None:
            break  # the library then raises its own error
        if isinstance(error, dist.DistError) and is_refusal(error):
            raise ConfigurationError(
                f"backend='nccl' cannot connect these ranks: {error}", reason="NCCL_REFUSED"
            ) from error
        if isinstance(error, RuntimeError) and not isinstance(error, ShoalError):
            raise GroupEndedError(f"connecting with NCCL failed: {cause_of(error)}") from error
        assert error is not None
        raise error
    raise GroupEndedError(given_up() or "given up")
