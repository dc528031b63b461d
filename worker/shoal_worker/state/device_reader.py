"""Copies a device's tensors to host memory while training continues.

When copying to memory that is not pinned, CUDA blocks the caller until the copy is complete, and
uses only a fraction of the bus bandwidth (NVIDIA, "CUDA C++ Best Practices Guide", "Pinned
Memory"). Tensors are therefore copied block by block through two pinned buffers on a separate
stream: while the caller processes one block, the next one is transferred.

Data that will be written while training continues is first copied on the device, in stream order.
This takes device memory, but no host thread waits for it, and later changes to the tensor do not
affect the copy. If the device does not have enough memory for the copy, the caller waits for the
transfer.

Any thread may create a `DeviceReader`, but only one thread may use it. `HostCopies` starts copies
on the training thread and completes them on any thread."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol

import torch

_BLOCK_BYTES: Final = 16 << 20
_OWN_PAGES: Final = 1 << 20
"""Size in bytes from which a copy has pages of its own."""
_SHARE_OF_ROOM: Final = 0.5
"""Fraction of the free device memory that copies may use."""


class Lane(Protocol):
    """Interface of a transfer path from one device to host memory."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Returns a buffer of `nbytes` bytes in host memory that the device can write to."""
        ...

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        """Starts copying bytes from the device into a buffer. Returns a function that waits for
        completion.

        This method and the returned function raise RuntimeError if the device has failed.
        """
        ...

    def fence(self) -> Callable[[], object]:
        """Returns a function that waits until the device has completed all work that the calling
        thread has queued so far."""
        ...

    def room(self) -> int:
        """Returns how many bytes of device memory are available for copies while training
        continues."""
        ...


class CudaLane:
    """Lane that uses a separate CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Returns a pinned buffer. torch keeps released pinned memory for the next request."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        """Starts a copy on this lane's stream. Returns a function that waits for it."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            source.record_stream(self._stream)
            arrived: Callable[[], object] = self._stream.record_event().synchronize
        return arrived

    def fence(self) -> Callable[[], object]:
        """Returns a function that waits for the work queued so far on the current stream."""
        reached: Callable[[], object] = (
            torch.cuda.current_stream(self._device).record_event().synchronize
        )
        return reached

    def room(self) -> int:
        """Returns the smaller of two sizes, in bytes: the device's free memory, including torch's
        cached memory; and the device's total memory minus torch's peak usage, which later passes
        may need again."""
        free, total = torch.cuda.mem_get_info(self._device)
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return max(0, min(free + kept, total - torch.cuda.max_memory_allocated(self._device)))


def lane_of(device: torch.device) -> Lane | None:
    """Returns a transfer path from `device`; None if its tensors are in host memory."""
    return CudaLane(device) if device.type == "cuda" else None


class DeviceReader:
    """Reads tensors of one device block by block. The device must already have computed the
    tensors."""

    def __init__(self, lane: Lane, *, block_bytes: int = _BLOCK_BYTES) -> None:
        self._lane = lane
        self._buffers = [lane.buffer(block_bytes) for _ in range(2)]
        self._block_bytes = block_bytes

    def blocks(self, pieces: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yields the bytes of flat byte tensors on the device, in order, as byte tensors in host
        memory. Each block is valid until the next one is requested. A block never contains bytes of
        two pieces.

        Raises RuntimeError if the device has failed.
        """
        coming: tuple[torch.Tensor, Callable[[], object]] | None = None
        for number, part in enumerate(
            part for piece in pieces for part in piece.split(self._block_bytes) if len(part)
        ):
            target = self._buffers[number % 2][: len(part)]
            arrived = self._lane.send(part, target)
            if coming is not None:
                coming[1]()
                yield coming[0]
            coming = target, arrived
        if coming is not None:
            coming[1]()
            yield coming[0]

    def read(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Copies a device tensor into a contiguous host tensor of the same dtype and shape."""
        place = 0
        there = bytes_in(into)
        for block in self.blocks([bytes_in(tensor)]):
            there[place : place + len(block)].copy_(block)
            place += len(block)


class HostCopies:
    """Copies device tensors to host memory while training continues. A copy has the tensor's values
    from the time of the request, and is complete once `arrive` has returned."""

    def __init__(self, lanes: Callable[[torch.device], Lane | None] | None = None) -> None:
        self._lane_of = lanes or lane_of
        self._lanes: dict[torch.device, Lane] = {}
        self._room: dict[torch.device, int] = {}
        self._coming: list[tuple[Lane, torch.Tensor, torch.Tensor]] = []
        """Pending transfers: lane, source on the device, and target in host memory."""
        self._fences: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    @torch.no_grad()
    def of(self, tensor: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Returns a contiguous host tensor that will receive the current values of `tensor`. Must
        be called on the training thread. `memory`: result of an earlier call that is no longer
        needed, for a tensor with as many elements (`keep_fitting`). Its memory is reused, because
        new memory costs several times as much as the copy: the kernel has to find and clear its
        pages."""
        plain = tensor.detach().resolve_conj().resolve_neg()
        copy = _new_memory(plain.shape, plain.dtype) if memory is None else memory.view(plain.shape)
        lane = self._lane(plain.device)
        if lane is None or not plain.numel():
            return copy.copy_(plain)
        there = self._copied_there(plain)
        if there is not None:
            self._coming.append((lane, there, copy))
        else:
            contiguous = plain.contiguous()
            lane.fence()()
            DeviceReader(lane).read(contiguous, copy)
        return copy

    def _copied_there(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns a copy of the tensor on its device; None if the device does not have enough
        memory."""
        if tensor.nbytes > self._room[tensor.device]:
            return None
        try:
            copy = tensor.clone(memory_format=torch.contiguous_format)
        except torch.OutOfMemoryError:  # the free memory may be fragmented
            self._room[tensor.device] = 0
            return None
        self._room[tensor.device] -= tensor.nbytes
        return copy

    def begun(self) -> None:
        """Marks the end of the requests. Must be called on the training thread, which may modify
        the tensors from now on."""
        self._fences = [
            lane.fence() for lane in {id(lane): lane for lane, _, _ in self._coming}.values()
        ]

    def arrive(self) -> None:
        """Waits until all copies are complete. May be called from any thread. A second call does
        nothing.

        Raises RuntimeError if the device has failed.
        """
        with self._lock:
            fences, self._fences = self._fences, []
            for wait in fences:
                wait()
            readers: dict[int, DeviceReader] = {}
            while self._coming:
                lane, tensor, copy = self._coming[-1]
                reader = readers.setdefault(id(lane), DeviceReader(lane))
                reader.read(tensor, copy)
                self._coming.pop()  # releases the memory on the device

    def _lane(self, device: torch.device) -> Lane | None:
        if device not in self._lanes:
            lane = self._lane_of(device)
            if lane is None:
                return None
            self._lanes[device] = lane
            self._room[device] = int(lane.room() * _SHARE_OF_ROOM)
        return self._lanes[device]


def keep_fitting(
    memory: dict[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Removes from `memory` each tensor that cannot receive a copy of the tensor with the same name
    in `wanted`, and returns `memory`. Must be called before the first copy, so that there is never
    more than one copy in memory."""
    for name, tensor in list(memory.items()):
        then = wanted.get(name)
        if then is None or (then.numel(), then.dtype) != (tensor.numel(), tensor.dtype):
            del memory[name]
    return memory


def _new_memory(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Returns an uninitialized tensor in host memory. If the tensor is large, forked processes,
    such as data workers, do not get its pages. Otherwise, the next copy would first have to
    duplicate the pages (copy on write)."""
    with torch.inference_mode(False):  # a later copy may be made outside the script's
        nbytes = shape.numel() * dtype.itemsize
        if nbytes < _OWN_PAGES:
            return torch.empty(shape, dtype=dtype)
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_DONTFORK)
        return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


def bytes_in(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor, as a flat tensor that shares its memory."""
    flat = tensor.detach().view(-1)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)
