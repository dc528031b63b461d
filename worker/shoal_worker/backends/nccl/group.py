"""Process group whose collectives run on a device's streams. It ensures that a step is committed
only if all of its collectives have completed on the device.

NCCL's `wait` returns when the kernel is queued, not when it has run, and an abort ends kernels
without an error. The values in their tensors then look like results. A step may be applied only if
all its collectives have completed. Therefore, `wait` here blocks until the device has finished, and
then checks whether the group has ended. If it has, `wait` raises an error only once none of the
group's kernels is running (ending.py), so that the caller may reuse the memory.

If every collective of a step waited in this way, the host would stop at every block of the model.
Therefore, there is a second way: with `order`, only the device waits, and before the step is
prepared, `settle` waits once for all ordered works. Values computed from a failed collective's
result are discarded with the step. ordered.py enforces the time limit of ordered works, for a host
that cannot call `settle`.

Errors are classified by their type and by where they are raised, not by their text. torch checks
arguments before it calls NCCL, and raises ValueError, TypeError or RuntimeError: these are the
caller's errors, and the group remains usable. DistBackendError comes from NCCL: the group has
ended. If CUDA raises an error again at every later call, the device has failed and the process
exits.

Threads: one thread issues collectives and waits; any thread may call `abort` and `overdue`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, Final, NoReturn

import torch
import torch.distributed as dist
from shoal_common.errors import InvalidRequestError
from torch.distributed import AllToAllOptions, Work

from shoal_worker.backends.base import GroupEndedError, cause_of
from shoal_worker.backends.nccl.device import Device
from shoal_worker.backends.nccl.ending import Ending
from shoal_worker.backends.nccl.ordered import OrderedWorks
from shoal_worker.backends.python_group import ForwardingGroup
from shoal_worker.backends.sparse_sum import SparseSum
from shoal_worker.backends.waits import Waits
from shoal_worker.torch_internals import AllgatherOptions, native_collective

_PAUSE_S: Final = 20e-6
_REFUSALS: Final = ("ncclInvalidArgument", "ncclInvalidUsage")
"""Names of NCCL's results for invalid calls, which torch includes in the message of its
DistBackendError."""


def is_refusal(error: Exception) -> bool:
    """Returns whether `error`, raised by a call to the library, means that the call is invalid."""
    if isinstance(error, dist.DistError):
        return any(name in str(error) for name in _REFUSALS)
    return True


class DeviceWork(Work):
    """Work of a collective on a device."""

    def __init__(self, name: str, native: Work, group: DeviceGroup) -> None:
        super().__init__()
        self._name = name
        self._native = native
        self._group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the device has written the result. A `timeout` of None or 0 means the
        group's timeout. Raises GroupEndedError if the group has ended, once none of its kernels is
        running. Exceeding the timeout aborts the group."""
        self._group.raise_if_ended()
        if not self._has_ended():
            self._await(timeout or self._group.timeout)
        self._follow()
        self._group.raise_if_ended()
        return True

    def order(self) -> None:
        """Makes the caller's stream wait for the collective, and returns immediately.
        `DeviceGroup.settle` later reports whether the collective has failed. Like `wait`, raises
        GroupEndedError if the group has already ended."""
        self._group.raise_if_ended()
        self._group.ordered.add(self)
        self._follow()

    @property
    def name(self) -> str:
        """The collective's name, for errors."""
        return self._name

    @property
    def ended(self) -> bool:
        """True if the kernel has run or failed, or the group has ended. May be read from any
        thread."""
        try:
            return self._group.ending.has_ended(self._native)
        except RuntimeError:  # `wait` reports the error
            return True

    def _await(self, allowed: timedelta) -> None:
        group = self._group
        deadline = time.monotonic() + allowed.total_seconds()
        with group.waits.of(self._name):
            while not self._has_ended():
                group.raise_if_ended()
                if time.monotonic() > deadline:
                    group.overdue(self._name, allowed)
                time.sleep(_PAUSE_S)

    def _follow(self) -> None:
        """Makes the caller's stream wait for the collective, and raises known errors."""
        self._group.raise_if_ended()
        try:
            self._native.wait()
        except RuntimeError as error:
            self._group.lost(self._name, error)

    def is_completed(self) -> bool:
        """Returns whether `wait` would return or raise soon."""
        return self._group.reason is not None or self._has_ended()

    def synchronize(self) -> None:
        """Waits for the collective, as `wait` does."""
        self.wait()

    def result(self) -> Any:
        """Returns the output tensors, once `wait` has returned."""
        return self._native.result()

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future of the output tensors. Operations that its callbacks queue on the device
        run after the collective. Unlike `wait`, the future does not report that the group has
        ended."""
        return self._native.get_future()

    def source_rank(self) -> int:
        """Returns the rank that sent the message received by `recv_anysource`."""
        return int(self._native._source_rank())

    _source_rank = source_rank

    def _has_ended(self) -> bool:
        """Returns whether the work has completed or failed, or the group has ended."""
        try:
            return self._group.ending.has_ended(self._native)
        except RuntimeError as error:
            self._group.lost(self._name, error)


class SparseWork(Work):
    """Work of an all-reduce of a sparse tensor. `wait` adds up the entries that `work` gathers."""

    def __init__(self, work: DeviceWork, entries: SparseSum) -> None:
        super().__init__()
        self._work = work
        self._entries: SparseSum | None = entries
        self._result: list[torch.Tensor] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the sum has been written. For the timeout and the errors, see
        `DeviceWork.wait`."""
        self._work.wait(timeout)
        entries, self._entries = self._entries, None
        if entries is not None:
            self._result = entries.write()
        return True

    def is_completed(self) -> bool:
        """Returns whether `wait` would return or raise soon."""
        return self._work.is_completed()

    def result(self) -> Any:
        """Returns the output tensor, once `wait` has returned."""
        return self._result


class DeviceGroup(ForwardingGroup):
    """Process group that issues collectives on a `native` group.

    `ended`: function called once with the reason, from any thread, when the group ends; it must
    call `ending.begin`.
    """

    backend_name: ClassVar[str] = "shoal_nccl"

    def __init__(
        self,
        native: dist.ProcessGroup,
        *,
        device: Device,
        ending: Ending,
        name: str,
        timeout: timedelta,
        ended: Callable[[str], None],
        waits: Waits | None = None,
    ) -> None:
        """`timeout`: time limit of a collective. `waits`: records the waits for the group's
        works."""
        super().__init__(native.rank(), native.size(), name)
        self.waits = waits or Waits()
        self.timeout = timeout
        self.reason: str | None = None
        """Reason why the group has ended; None while it is usable."""
        self._native: dist.ProcessGroup | None = native
        self._device = device
        self.ending: Final = ending
        self._ended = ended
        self.ordered: Final = OrderedWorks(timeout, self.overdue)
        """Works passed to `order`, which streams wait for but the host has not checked yet."""

    def abort(self, reason: str = "the process group was aborted") -> None:
        """Aborts the group: pending and later works raise GroupEndedError(reason). Later calls do
        not change the reason. Callable from any thread."""
        if self.reason is None:
            self.reason = reason
            self._ended(reason)
            self.ordered.close()

    def overdue(self, name: str, allowed: timedelta) -> None:
        """Aborts the group because a collective has exceeded its time limit. Callable from any
        thread."""
        self.abort(f"{name} on rank {self.rank()} of {self.size()} took longer than {allowed}")

    def settle(self) -> None:
        """Blocks until all ordered works have completed. Raises GroupEndedError if one has failed,
        once none of the group's kernels is running."""
        for work in self.ordered.take():
            work.wait()
        self.raise_if_ended()

    def shutdown(self) -> None:
        """Aborts the group, waits until none of its kernels is running, and releases the native
        group. Idempotent."""
        self.abort("the process group was shut down")
        self.ending.wait()
        self._native = None

    def raise_if_ended(self) -> None:
        """Raises GroupEndedError if the group has ended, once none of its kernels is running."""
        if self.reason is not None:
            self.ending.wait()
            raise GroupEndedError(self.reason)

    def lost(self, name: str, error: RuntimeError) -> NoReturn:
        """Aborts the group because a collective has failed, and raises GroupEndedError. Exits the
        process if the device has failed."""
        if self._device.has_failed(error):
            self.ending.failed(cause_of(error))
        self.abort(f"{name} on rank {self.rank()} of {self.size()} failed: {cause_of(error)}")
        self.ending.wait()
        raise GroupEndedError(self.reason or cause_of(error)) from error

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Implements `ProcessGroup.allreduce`, for sparse tensors as well."""
        if len(tensors) == 1 and tensors[0].is_sparse:
            entries = SparseSum(self, tensors[0], opts)
            arguments = (entries.gathered, entries.packed, AllgatherOptions())
            return SparseWork(self._issue("all_gather_single", arguments, {}), entries)
        return self._issue("allreduce", (tensors,) if opts is None else (tensors, opts), {})

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        """Implements `ProcessGroup.all_to_all_single` with explicit sizes even for equal parts.

        Without sizes, torch calls ncclAlltoAll (2.11: all2all_single_equal_split), and treats
        ncclInProgress, which a non-blocking communicator may return, as an error. It also does not
        compare the tensors, so NCCL would write past the end of a shorter `output`.
        """
        if not output_sizes and not input_sizes:
            parts = self.size()
            divide = all(each.dim() and each.shape[0] % parts == 0 for each in (output, input))
            if not divide or output.numel() != input.numel() or output.dtype != input.dtype:
                raise InvalidRequestError(
                    f"all_to_all_single on rank {self.rank()} of {parts} without sizes: output is "
                    f"{list(output.shape)} {output.dtype} and input is {list(input.shape)} "
                    f"{input.dtype}; expected the same dtype and number of elements, and first "
                    f"dimensions divisible by {parts}"
                )
            output_sizes = [output.shape[0] // parts] * parts
        return self._issue(
            "all_to_all_single",
            (output, input, output_sizes, input_sizes, opts or AllToAllOptions()),
            {},
        )

    alltoall_base: Any = all_to_all_single

    def _issue(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> DeviceWork:
        native = self._native
        self.raise_if_ended()
        assert native is not None
        try:
            return DeviceWork(name, native_collective(native, name)(*arguments, **options), self)
        except (RuntimeError, ValueError, TypeError) as error:
            if isinstance(error, RuntimeError) and (
                self._device.has_failed(error) or not is_refusal(error)
            ):
                self.lost(name, error)
            # if the group has ended, its errors about arguments are not the caller's mistake
            self.raise_if_ended()
            raise InvalidRequestError(
                f"NCCL cannot run {name} on rank {self.rank()} of {self.size()}: {cause_of(error)}"
            ) from error
