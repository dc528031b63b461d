"""Additional handling of Gloo's collectives and messages if the tensors are on a CUDA
device.

Collectives of such tensors are Gloo's own: it copies them to pinned memory and back, on streams of
its own (ProcessGroupGloo.cpp, torch 2.13). Whoever waits for such a work has the current stream of
its thread come after the copy back, and so has Gloo's thread, with its own current stream, before
it says that the work is complete. What Shoal computes from the result may run in either thread:
`StreamOrder` has it run on the stream on which the collective was issued, and has every stream that
waits come after that.

Messages are different: Gloo's send and recv take the tensor's address as one of host memory. Here
they go by a copy in host memory.

Threads: a `StreamOrder` is made by the thread that issues, and entered by the one that finishes;
what waits is any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import Work


class Order(Protocol):
    """The order of a device's computations before, in and after one collective."""

    def finishing(self) -> contextlib.AbstractContextManager[None]:
        """Context that is entered once Gloo's work is complete: operations queued inside run after
        the collective's result."""
        ...

    def come_after(self) -> None:
        """Orders later work of the calling thread after everything queued in `finishing`."""
        ...


class StreamOrder:
    """Stream order of a collective issued now, on the calling thread's current stream of `device`.
    An `Order`."""

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
    """Returns the order of a collective issued now with these arguments: tensors, lists of them,
    and others. None: no argument is on a CUDA device, and the host's own order suffices."""
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
    """Returns a complete copy in host memory."""
    return host_memory_for(tensor).copy_(tensor.detach())


def host_memory_for(tensor: torch.Tensor) -> torch.Tensor:
    """Returns host memory of the same size, pinned if that speeds up copies."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


class ArrivingElsewhere(Work):
    """A message that Gloo receives into host memory. `wait` copies it to its destination."""

    def __init__(self, received: Any, host: torch.Tensor, into: torch.Tensor) -> None:
        """`received`: the transfer into `host`."""
        super().__init__()
        self._received = received
        self._host: torch.Tensor | None = host
        self._into = into

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits like the transfer. Operations that the calling thread queues next see the
        tensor."""
        self._received.wait(timeout)
        host, self._host = self._host, None
        if host is not None:
            self._into.data.copy_(host)
        return True

    def is_completed(self) -> bool:
        """Returns whether `wait` has returned."""
        return self._host is None

    def source_rank(self) -> int:
        """Returns the sender's rank of a message received by `recv_anysource`."""
        return int(self._received.source_rank())

    _source_rank = source_rank
