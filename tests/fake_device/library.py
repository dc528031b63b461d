"""Stand-ins for torch's ProcessGroupNCCL, for the class that replaces it in scripts from torch 2.15
on, and for one rank's CUDA device, over a machine.

The texts of errors are torch's (ProcessGroupNCCL.cpp of 2.13). The watchdog reads the environment
when a group is created, as torch's does. It ends no process and never sleeps, but records when it
would have.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from shoal_worker.backends.collective import Collective, op_name
from shoal_worker.backends.nccl.device import CudaDevice
from shoal_worker.backends.python_group import PythonGroup
from torch._C._distributed_c10d import Store, Work

from tests.fake_device.machine import Communicator, Kernel, Machine

_SUPPORTED = (
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),  # counted as twice as many real numbers
)


class KernelWork(Work):
    """A stand-in for WorkNCCL: complete when its end event has occurred, or when NCCL has noticed
    an error, whatever the kernel does then."""

    def __init__(self, native: FakeNCCL, kernel: Kernel, result: Any) -> None:
        super().__init__()
        self._native, self._machine, self._kernel, self._result = (
            native,
            native._machine,
            kernel,
            result,
        )

    def is_completed(self) -> bool:
        """Takes the communicator's mutex and keeps the GIL, as torch 2.11 does."""
        held = self._native._mutex_held_for
        if held is not None:
            self._machine.freeze(f"a work of rank {self._native.rank()} is asked during {held}")
            with self._native._communicator_lock:
                pass
        self._machine.look()
        self._machine.check(self._kernel.stream.device)
        return self._kernel.ended or self._error is not None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Makes the caller's stream wait until the kernel has ended, possibly by an abort. Here,
        the stream is the caller itself. Raises an error that NCCL has noticed by now."""
        stream = self._kernel.stream
        failed = self._machine.failed
        self._machine.until(
            lambda: self._kernel.ended or self._error is not None or stream.device in failed,
            "a stream that waits for a kernel",
        )
        self._machine.check(stream.device)
        if self._error is not None:
            self._machine.begin_abort(stream)
            raise dist.DistBackendError(self._error)
        return True

    def result(self) -> Any:
        return self._result

    @property
    def _error(self) -> str | None:
        noticed = self._kernel.stream.error
        return self._kernel.exception or (None if noticed is None else f"NCCL error: {noticed}")


class Options:
    """A stand-in for ProcessGroupNCCL.Options."""

    def __init__(self) -> None:
        self._timeout = timedelta(minutes=10)
        self.config = SimpleNamespace(blocking=-1)
        self.split_color = -2

    split_from: FakeNCCL | None = None


class FakeNCCL(PythonGroup):
    """A stand-in for ProcessGroupNCCL on one device."""

    Options = Options

    def __init__(
        self, machine: Machine, device: int, store: Store, rank: int, size: int, options: Options
    ) -> None:
        super().__init__(rank, size, f"fake_nccl_{device}")
        self._machine, self._device, self._store, self._options = machine, device, store, options
        self._stream: Any = None
        self._communicator_lock = threading.Lock()
        """The communicator's mutex: held while torch waits for the communicator, aborts it or
        destroys it."""
        self._mutex_held_for: str | None = None
        """Description of the current owner; None if the mutex is free."""
        self.would_have_killed: str | None = None
        """Reason for which the watchdog would have ended the process."""
        self.would_have_slept_s = 0.0
        """Time for which the watchdog would have slept, with the lock that the next collective
        needs."""
        desync = (
            _flag("TORCH_NCCL_DESYNC_DEBUG") or dist.get_debug_level() == dist.DebugLevel.DETAIL
        )
        self._tears_down = _tears_down() or desync
        self._dump_ms = int(os.environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000"))
        machine.watchdogs.append(self._watch)

    # --- life cycle

    def eager_connect_single_device(self, device: torch.device) -> None:
        whole = self._options.split_from
        if whole is not None:
            self._stream = whole._split(self._options.split_color).join(self.rank(), self._device)
            return
        if self.rank() == 0:
            self._store.set("0", f"{id(self._store)}-{time.monotonic_ns()}")
        key = self._store.get("0").decode()
        stream = self._machine.communicator(key, self.size()).join(self.rank(), self._device)
        if self._blocks:
            # torch has no handle until all ranks have connected, so an abort finds nothing
            self._machine.until(lambda: stream.communicator.ready, "a communicator that blocks")
        self._stream = stream

    @property
    def _blocks(self) -> bool:
        return bool(self._options.config.blocking)

    @contextlib.contextmanager
    def _mutex(self, what: str) -> Iterator[None]:
        with self._communicator_lock:
            self._mutex_held_for = what
            try:
                yield
            finally:
                self._mutex_held_for = None

    def _split(self, color: int) -> Communicator:
        """Splits this communicator and returns this rank's part. Blocks until all ranks of the
        communicator have called it; meanwhile holds the lock that an abort of the communicator
        needs."""
        with self._mutex("a split"):
            found = self._machine.split(self._stream, color)
            self._await(lambda: found() is not None)
        communicator = found()
        assert communicator is not None
        return communicator

    def comm_split_count(self) -> int:
        splits: int = self._stream.splits
        return splits

    def abort(self) -> None:
        if self._stream is None:
            return
        with self._mutex("an abort"):
            if self._stream.destroyed:  # torch would pass on a dangling pointer
                self._machine.crashes.append(
                    f"rank {self.rank()} aborts a communicator that was destroyed"
                )
            self._machine.begin_abort(self._stream)
            self._machine.until(lambda: self._stream.aborted, "an abort to complete")

    def shutdown(self) -> None:
        """Finalizes and then destroys the communicator. Both wait until all ranks have called this,
        with the locks that an abort needs."""
        if self._stream is None:
            return
        with self._mutex("a finalization"):
            self._machine.until(
                lambda: all(kernel.ended for kernel in self._stream.queue),
                "a communicator to be flushed",
            )
            self._machine.finalize(self._stream)
            self._await(lambda: self._stream.destroyed)

    def _ready(self) -> None:
        communicator = self._stream.communicator
        if communicator.ready and communicator.refused is None:
            return
        with self._mutex("a wait for the communicator"):
            self._await(lambda: communicator.ready)
        if communicator.refused is not None:
            raise dist.DistBackendError(
                "NCCL error in: NCCLUtils.cpp:77, invalid usage, NCCL version "
                "2.29.7\nncclInvalidUsage: This usually reflects invalid usage of NCCL "
                f"library.\nLast error:\n{communicator.refused}"
            )

    def _await(self, there: Callable[[], bool]) -> None:
        """Waits for a busy non-blocking communicator as torch does, with a lock held."""
        deadline = time.monotonic() + int(os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1800"))
        while not there():
            if time.monotonic() > deadline:
                raise dist.DistBackendError("NCCL timeout in: NCCLUtils.cpp:139")
            self._machine.look()
            time.sleep(0.001)

    def _watch(self) -> None:
        """Runs one check of the watchdog."""
        if self._stream is None or self._stream.aborting:
            return
        limit_s = self._options._timeout.total_seconds()
        late = [
            k
            for k in self._stream.queue
            if not k.ended and self._machine.seconds - k.issued_s >= limit_s
        ]
        for kernel in late:
            kernel.exception = (
                f"Watchdog caught collective operation timeout: ran for {limit_s:g} s"
            )
        if late or self._stream.error is not None:
            self.would_have_slept_s += 4 * self._dump_ms / 1000
            if self._tears_down:
                self.would_have_killed = self._stream.error or f"a collective ran for {limit_s:g} s"

    # --- collectives

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """Implements `ProcessGroup.allreduce`."""
        if tensors[0].is_sparse:
            raise RuntimeError(
                "NCCL does not support all_reduce with sparse tensors. Please use dense tensors "
                "instead."
            )
        return super().allreduce(tensors, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        """Implements `ProcessGroup.all_to_all_single`. Without sizes, torch 2.11 treats "in
        progress" as an error."""
        work = super().all_to_all_single(output, input, output_sizes, input_sizes, opts)
        if not output_sizes and not input_sizes and not self._blocks:
            raise dist.DistBackendError("NCCL Error 7: NCCL operation in progress")
        return work

    alltoall_base: Any = all_to_all_single

    def _issue(self, call: Collective) -> Work:
        for tensor in (*call.inputs, *call.outputs):
            _check(tensor)
        if call.op is not None and op_name(call.op) in ("BAND", "BOR", "BXOR"):
            raise ValueError(f"Cannot use ReduceOp.{op_name(call.op)} with NCCL")
        return self._queue(Kernel(self._stream, call), call.result)

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        _check(tensor)
        return self._queue(Kernel(self._stream, None, peer, sent=tensor), [tensor])

    def _receive(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Work:
        _check(tensor)
        assert peer is not None
        return self._queue(Kernel(self._stream, None, peer, received=tensor), [tensor])

    def _queue(self, kernel: Kernel, result: Any) -> Work:
        self._machine.look()
        self._machine.check(self._device)
        self._ready()
        if self._stream.aborting:
            raise dist.DistBackendError("NCCL communicator was aborted on rank " + str(self.rank()))
        self._machine.queue(kernel)
        return KernelWork(self, kernel, result)


class FakeNCCL2(FakeNCCL):
    """A stand-in for ProcessGroupNCCL2, torch's "nccl" from 2.15 on. It connects when it is
    created, and its watchdog reads a single variable and does not sleep."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._tears_down, self._dump_ms = _tears_down(), 0
        self.eager_connect_single_device(torch.device("cpu"))

    @property
    def _blocks(self) -> bool:
        return True


class FakeCuda(CudaDevice):
    """The device of one rank. Its number is its identity."""

    kind: ClassVar[str] = "cpu"
    """Type of the device on which the stand-in's tensors are."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number
        self.device = torch.device("cpu")
        self.natives: list[FakeNCCL] = []

    @property
    def where(self) -> str:
        return f"cuda:{self.number}"

    def identity(self) -> str:
        return f"GPU-{self.number}"

    def synchronize(self) -> None:
        self.machine.until(
            lambda: self.number in self.machine.failed or not self.machine.busy(self.number),
            f"{self.where} to be at rest",
        )
        self.machine.check(self.number)

    def has_failed(self, error: RuntimeError) -> bool:
        return (
            isinstance(error, torch.AcceleratorError | dist.DistError)
            and self.number in self.machine.failed
        )

    def _library(self) -> Any:
        return _Made(self)

    def _grouped(self, native: Any, store: Store, rank: int, size: int) -> dist.ProcessGroup:
        assert isinstance(native, dist.ProcessGroup)
        return native


class _Made:
    """A stand-in for the class, as its user sees it: its groups are on one device."""

    Options = Options

    def __init__(self, device: FakeCuda) -> None:
        self._device = device

    def __call__(self, store: Store, rank: int, size: int, options: Options) -> FakeNCCL:
        native = FakeNCCL(self._device.machine, self._device.number, store, rank, size, options)
        self._device.natives.append(native)
        return native

    def get_runtime_nccl_version(self) -> tuple[int, int, int]:
        return 2, 29, 7


@contextlib.contextmanager
def leaving_together(done: threading.Barrier, limit: timedelta) -> Iterator[None]:
    """Runs a rank as a thread. The rank leaves when all have finished or one has failed, so that no
    rank closes its connections during another's last collective."""
    try:
        yield
        done.wait(limit.total_seconds())
    except BaseException:  # any exception: the others must not wait for this rank
        done.abort()
        raise


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Runs each call in a thread of its own. Returns its result, or the exception that it
    raised."""
    outcomes: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            outcomes[number] = calls[number]()
        except BaseException as error:  # any exception is an outcome
            outcomes[number] = error

    threads = [
        threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return outcomes


def _check(tensor: torch.Tensor) -> None:
    if tensor.is_sparse:
        raise ValueError("Tensors must be CUDA and dense")
    if not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    if tensor.dtype not in _SUPPORTED:
        raise TypeError(
            f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}"
        )


def _tears_down() -> bool:
    return int(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")) in (1, 3)


def _flag(name: str) -> bool:
    return os.environ.get(name, "0").lower() in ("1", "true", "y")
