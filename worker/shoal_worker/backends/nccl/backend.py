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
from shoal_worker.backends.base import CommunicationBackend, GroupEndedError, cause_of
from shoal_worker.backends.nccl.device_group import DeviceGroup
from shoal_worker.settings import set_nccl_defaults

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
