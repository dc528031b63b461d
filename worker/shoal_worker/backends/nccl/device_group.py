"""A process group whose collectives run on a device's streams, made safe to commit on.

NCCL's `wait` returns when the kernel is queued, not when it has run, and an abort ends kernels without an error: what they leave in their
tensors looks like a result. A step must be applied only when all its collectives completed. So a wait here lasts until the device is done,
and then asks whether the group was ended meanwhile. That costs the queueing ahead of one step; nothing else would be right.

NCCL's own watchdog ends the process on an error or a timeout; it is told not to (backend.py), and timeouts are kept here.

Threads: one thread issues collectives and waits; `abort` is for any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from shoal_worker.backends.base import GroupEndedError, Waits, cause_of
from shoal_worker.backends.python_group import ForwardingGroup

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
