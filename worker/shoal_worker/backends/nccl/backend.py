"""NCCL: collectives between NVIDIA GPUs.

NCCL finds its interfaces by itself (NCCL_SOCKET_IFNAME), so `hostname` is not used. The group is bound to the current CUDA device: call
torch.cuda.set_device first. It has not run on a GPU yet; what needs none is tested on stand-ins.

Connecting blocks in C++ and cannot be interrupted, so it runs in a thread of its own, which ends when NCCL lets go of it.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError, DeadlineError, ShoalError
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal_worker.backends import native_threads
from shoal_worker.backends.base import CommunicationBackend, GroupEndedError, Waits, cause_of
from shoal_worker.backends.python_group import ForwardingGroup
from shoal_worker.settings import set_nccl_defaults
from shoal_worker.torch_internals import Work

# ------------------------------------------------------------------------------------------------------------------------ the process group
#
# A process group whose collectives run on a device's streams, made safe to commit on.
#
# NCCL's `wait` returns when the kernel is queued, not when it has run, and an abort ends kernels without an error: what they leave in their
# tensors looks like a result. A step must be applied only when all its collectives completed. So a wait here lasts until the device is
# done, and then asks whether the group was ended meanwhile. That costs the queueing ahead of one step; nothing else would be right.
#
# NCCL's own watchdog ends the process on an error or a timeout; it is told not to (`set_nccl_defaults`), and timeouts are kept here.
#
# Threads: one thread issues collectives and waits; `abort` is for any thread.


_PAUSE_S: Final = 20e-6


class DeviceWork(Work):
    """A collective on a device."""

    def __init__(self, name: str, native: Work, group: DeviceGroup) -> None:
        super().__init__()
        self._name = name
        self._native = native
        self._group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the device has the result in place. `timeout` None or 0: the group's.

        Raises GroupEndedError when the group is over, which it also is when this takes too long.
        """
        allowed = timeout or self._group.timeout
        deadline = time.monotonic() + allowed.total_seconds()
        with self._group.waits.of(self._name):
            while not self._native.is_completed():
                self._group.raise_if_ended()
                if time.monotonic() > deadline:
                    self._group.abort(f"{self._name} on rank {self._group.rank()} of {self._group.size()} takes longer than {allowed}")
                time.sleep(_PAUSE_S)
        self._group.raise_if_ended()
        try:
            self._native.wait()  # orders the caller's stream behind it, and raises what went wrong
        except RuntimeError as error:
            self._group.lost(self._name, error)
            raise
        self._group.raise_if_ended()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._group.reason is not None or bool(self._native.is_completed())

    def synchronize(self) -> None:
        """Waits for the collective, as `wait` does."""
        self.wait()

    def result(self) -> Any:
        """The output tensors, once `wait` has returned."""
        return self._native.result()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the output tensors, in the order of the device's streams. It does not tell that the group was ended: `wait` does."""
        return self._native.get_future()

    def source_rank(self) -> int:
        """Who sent what `recv_anysource` received."""
        return int(self._native._source_rank())

    _source_rank = source_rank


class DeviceGroup(ForwardingGroup):
    """Issues collectives on a `native` group. `ended(reason)` is called once, from any thread, when it is over; it ends the native one."""

    backend_name: ClassVar[str] = "shoal_nccl"

    def __init__(
        self, native: dist.ProcessGroup, *, name: str, timeout: timedelta, ended: Callable[[str], None], waits: Waits | None = None
    ) -> None:
        """`timeout`: the longest that a collective may take. `waits` notes the waits for its works."""
        super().__init__(native.rank(), native.size(), name)
        self.waits = waits or Waits()
        self.timeout = timeout
        self.reason: str | None = None
        """Why the group is over; None: it is not."""
        self._native: dist.ProcessGroup | None = native
        self._ended = ended

    def abort(self, reason: str = "the process group was aborted") -> None:
        """Ends what is pending and refuses what comes, with GroupEndedError(reason). The first reason stays. Any thread."""
        if self.reason is None:
            self.reason = reason
            self._ended(reason)

    def shutdown(self) -> None:
        """Ends the group and lets go of the native one. Idempotent."""
        self.abort("the process group was shut down")
        self._native = None

    def raise_if_ended(self) -> None:
        """Raises GroupEndedError when the group is over."""
        if self.reason is not None:
            raise GroupEndedError(self.reason)

    def lost(self, name: str, error: RuntimeError) -> None:
        """Raises GroupEndedError if that failure of a collective means that the group is over; others are the caller's mistakes."""
        if self.reason is not None or isinstance(error, dist.DistError) or "NCCL" in str(error):
            self.abort(f"{name} on rank {self.rank()} of {self.size()} failed: {cause_of(error)}")
            raise GroupEndedError(self.reason or cause_of(error)) from error

    def _issue(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Work:
        native = self._native
        self.raise_if_ended()
        assert native is not None
        try:
            return DeviceWork(name, getattr(native, name)(*arguments, **options), self)
        except RuntimeError as error:
            self.lost(name, error)
            raise


# ------------------------------------------------------------------------------------------------------------------------------ the backend


_PATIENCE: Final = {
    # Its watchdog ends the process on an error, and when a collective or it itself is slow. Shoal re-forms instead.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
_NUMBERS: Final = itertools.count()
_LOOK_S: Final = 0.02


class NCCLBackend(CommunicationBackend):
    """A `ProcessGroupNCCL` of its own, on CUDA tensors. Raises ConfigurationError where torch has no CUDA or no NCCL."""

    name: ClassVar[str] = "nccl"
    device_type: ClassVar[str] = "cuda"
    averages_natively: ClassVar[bool] = True

    def __init__(self) -> None:
        if not dist.is_nccl_available():
            raise ConfigurationError("backend='nccl': this torch is built without NCCL; install a CUDA build, or use backend='gloo'")
        if not torch.cuda.is_available():
            raise ConfigurationError("backend='nccl': no CUDA device; check the driver and CUDA_VISIBLE_DEVICES, or use backend='gloo'")
        super().__init__()
        self._native: Any = None
        """The ProcessGroupNCCL."""
        self._group: DeviceGroup | None = None

    def _connect(self, store: Store, timeout: timedelta, connect_timeout: timedelta, hostname: str | None) -> dist.ProcessGroup:
        set_nccl_defaults(_PATIENCE)
        device = self._device()
        self._native = _within(connect_timeout, lambda: self._connected(store, device, connect_timeout), given_up=lambda: self._reason)
        native = dist.ProcessGroup(PrefixStore("group", store), self.rank, self.world_size)
        kind = dist.ProcessGroup.BackendType.NCCL
        native._set_default_backend(kind)
        native._register_backend(device, kind, self._native)
        self._group = DeviceGroup(native, name=f"shoal_nccl_{next(_NUMBERS)}", timeout=timeout, ended=self.abort, waits=self.waits)
        if self._reason is not None:  # ended while it connected, when there was nothing to break yet
            self._break()
        return self._group

    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def _connected(self, store: Store, device: torch.device, connect_timeout: timedelta) -> Any:
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = connect_timeout  # of the store's part in it; collectives have the group's own
        native = ProcessGroupNCCL(PrefixStore("nccl", store), self.rank, self.world_size, options)
        if self._reason is None:
            # Otherwise NCCL connects with the first collective, under that one's timeout.
            native.eager_connect_single_device(device)
        return native

    def _break(self) -> None:
        native, group = self._native, self._group
        if group is not None:
            group.abort(self._reason or "given up")
        if native is not None:
            native_threads.start(native.abort, name="shoal-nccl-abort")

    def _release(self) -> None:
        group, self._group = self._group, None
        self._native = self._process_group = None
        if group is not None:
            group.shutdown()

    def _is_broken(self, error: RuntimeError) -> bool:
        return False  # the group raises MembershipChanged itself


def _within(limit: timedelta, connect: Callable[[], Any], *, given_up: Callable[[], str | None]) -> Any:
    """What `connect` returns, in a thread of its own.

    Raises MembershipChanged when it was given up or failed, DeadlineError after `limit`, what else `connect` raises. What it returns after
    that is dropped.
    """
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

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
                f"connecting with NCCL took longer than connect_timeout={limit.total_seconds():g} s", reason="CONNECT_TIMEOUT"
            )
        try:
            connected, error = answers.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
        if isinstance(error, RuntimeError) and not isinstance(error, ShoalError):
            raise GroupEndedError(f"connecting with NCCL failed: {cause_of(error)}") from error
        if error is not None:
            raise error
        return connected
    raise GroupEndedError(given_up() or "given up")
