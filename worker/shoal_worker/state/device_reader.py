"""A device's tensors, brought into the host's memory beside the training.

Told to copy a tensor into memory that is not pinned, CUDA holds up the caller until all of it has
come, at a fraction of what the bus carries (NVIDIA, "CUDA C++ Best Practices Guide", "Pinned
Memory"). So tensors come block by block through two pinned buffers, on a stream of their own: while
the caller uses one block, the next one travels.

What is to be written while training goes on is first copied on the device, in the order of what is
computed there: that takes what the device's memory takes, no host waits for it, and what changes
the tensor afterwards changes nothing in the copy. A device that has no room for the copy is waited
for.

Threads: a `DeviceReader` belongs to one thread, and any thread may make one. `HostCopies` begins on
the training thread and arrives on any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

import torch

_BLOCK_BYTES: Final = 16 << 20
_SHARE_OF_ROOM: Final = 0.5
"""What copies may take of the device's memory that is free."""


class Lane(Protocol):
    """The way from one device into the host's memory."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Bytes in the host's memory that the device can write."""
        ...

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        """Begins to copy bytes of the device into a buffer. What it returns waits until they are
        there.

        Raises RuntimeError where the device has failed, as does what it returns.
        """
        ...

    def fence(self) -> Callable[[], object]:
        """What it returns waits until the device has done all that the calling thread has queued on
        it up to now."""
        ...

    def room(self) -> int:
        """How many bytes of the device's memory may be taken, though training goes on."""
        ...


class CudaLane:
    """See `Lane`. On a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """See `Lane`. torch keeps pinned memory that was given back, for the next one who asks."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        """See `Lane`."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            source.record_stream(self._stream)
            arrived: Callable[[], object] = self._stream.record_event().synchronize
        return arrived

    def fence(self) -> Callable[[], object]:
        """See `Lane`."""
        reached: Callable[[], object] = (
            torch.cuda.current_stream(self._device).record_event().synchronize
        )
        return reached

    def room(self) -> int:
        """See `Lane`: what the driver has, and what torch keeps of it for later; but not what the
        passes of a step have needed."""
        free, total = torch.cuda.mem_get_info(self._device)
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return max(0, min(free + kept, total - torch.cuda.max_memory_allocated(self._device)))


def lane_of(device: torch.device) -> Lane | None:
    """The way from `device`; None where its tensors are in the host's memory."""
    return CudaLane(device) if device.type == "cuda" else None


class DeviceReader:
    """Reads tensors of one device. What is read must have been computed: its user has waited for
    it."""

    def __init__(self, lane: Lane, *, block_bytes: int = _BLOCK_BYTES) -> None:
        self._lane = lane
        self._buffers = [lane.buffer(block_bytes) for _ in range(2)]
        self._block_bytes = block_bytes

    def blocks(self, pieces: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The bytes of flat tensors of bytes, one after the other, in tensors of bytes in the
        host's memory: each holds until the next one is asked for. No block reaches over the end of
        a piece.

        Raises RuntimeError where the device has failed.
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
        """Fills a contiguous tensor of the host with one of the device, of the same dtype and
        shape."""
        place = 0
        there = bytes_in(into)
        for block in self.blocks([bytes_in(tensor)]):
            there[place : place + len(block)].copy_(block)
            place += len(block)


class HostCopies:
    """Copies of tensors in the host's memory, as the tensors are when they are asked for. They are
    there once `arrive` has returned."""

    def __init__(self, lanes: Callable[[torch.device], Lane | None] | None = None) -> None:
        self._lane_of = lanes or lane_of
        self._lanes: dict[torch.device, Lane] = {}
        self._room: dict[torch.device, int] = {}
        self._coming: list[tuple[Lane, torch.Tensor, torch.Tensor]] = []
        """What is to be read from the device, and where to."""
        self._fences: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    @torch.no_grad()
    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor in the host's memory, for the values that `tensor` has now. On the
        training thread."""
        plain = tensor.detach().resolve_conj().resolve_neg()
        copy = torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
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
        """A copy on the device; None: there is no room for one."""
        if tensor.nbytes > self._room[tensor.device]:
            return None
        try:
            copy = tensor.clone(memory_format=torch.contiguous_format)
        except torch.OutOfMemoryError:  # in pieces that are too small
            self._room[tensor.device] = 0
            return None
        self._room[tensor.device] -= tensor.nbytes
        return copy

    def begun(self) -> None:
        """All has been asked for. On the training thread, which may change the tensors from here
        on."""
        self._fences = [
            lane.fence() for lane in {id(lane): lane for lane, _, _ in self._coming}.values()
        ]

    def arrive(self) -> None:
        """Returns when all copies are there. Any thread; nothing is left to do for the second that
        calls it.

        Raises RuntimeError where the device has failed.
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
                self._coming.pop()  # its memory on the device is free again

    def _lane(self, device: torch.device) -> Lane | None:
        if device not in self._lanes:
            lane = self._lane_of(device)
            if lane is None:
                return None
            self._lanes[device] = lane
            self._room[device] = int(lane.room() * _SHARE_OF_ROOM)
        return self._lanes[device]


def bytes_in(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a flat tensor that shares its memory."""
    flat = tensor.detach().view(-1)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)
