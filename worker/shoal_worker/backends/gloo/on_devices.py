"""Gloo's collectives and messages for tensors on a CUDA device.

Gloo supports collectives on such tensors: it copies them to pinned memory and back, on its own
streams (ProcessGroupGloo.cpp, torch 2.13). When a thread waits for such a work, its current stream
waits for the copy back to the device. Gloo's thread does the same with its own current stream
before it reports the work as complete. Shoal's computations on the result may run in either thread.
`StreamOrder` runs them on the stream that the collective was issued on, and makes every waiting
stream wait for them.

Messages are different: Gloo's send and recv treat the tensor's address as an address in host
memory. They are therefore sent from, and received into, a copy in host memory.

Threads: the thread that issues the collective creates a `StreamOrder`, the thread that finishes it
enters `finishing`, and any thread may call `come_after`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import Work


class Order(Protocol):
    """Keeps a device's computations before, during and after one collective in the right order."""

    def finishing(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context to enter once Gloo's work is complete. Operations queued in it run
        after the collective."""
        ...

    def come_after(self) -> None:
        """Makes later computations of the calling thread run after all operations queued in
        `finishing`."""
        ...


class StreamOrder:
    """`Order` of a collective that is issued on the calling thread's current stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self._done: Any = None

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Implements `Order.finishing`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._done = self._stream.record_event()

    def come_after(self) -> None:
        """Implements `Order.come_after`."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)


def order_of(arguments: Iterable[Any]) -> Order | None:
    """Returns the `Order` for a collective that is about to be issued with these arguments
    (tensors, lists of tensors, and other values). Returns None if the tensors are not on a CUDA
    device, because the order of calls on the host then suffices."""
    device = _first_device(arguments)
    return StreamOrder(device) if device is not None and device.type == "cuda" else None


def _first_device(arguments: Iterable[Any]) -> torch.device | None:
    for one in arguments:
        if isinstance(one, torch.Tensor):
            return one.device
        if isinstance(one, list) and (found := _first_device(one)) is not None:
            return found
    return None


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is not in host memory."""
    return not tensor.is_cpu


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor in host memory. The copy is complete on return."""
    return host_memory_for(tensor).copy_(tensor.detach())


def host_memory_for(tensor: torch.Tensor) -> torch.Tensor:
    """Returns host memory of the tensor's size, pinned if that speeds up copies."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


class ArrivingElsewhere(Work):
    """Work of a message that Gloo receives into host memory, although its destination is on a
    device. `wait` copies the message to the device."""

    def __init__(self, received: Any, host: torch.Tensor, into: torch.Tensor) -> None:
        """`received`: the transfer into `host`. `into`: destination of the message."""
        super().__init__()
        self._received = received
        self._host: torch.Tensor | None = host
        self._into = into

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the transfer. Operations that the calling thread queues afterwards use the
        received values."""
        self._received.wait(timeout)
        host, self._host = self._host, None
        if host is not None:
            self._into.data.copy_(host)
        return True

    def is_completed(self) -> bool:
        """Returns whether `wait` has returned."""
        return self._host is None

    def source_rank(self) -> int:
        """Returns the rank that sent the message received by `recv_anysource`."""
        return int(self._received.source_rank())

    _source_rank = source_rank
