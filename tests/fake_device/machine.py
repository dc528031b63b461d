"""The devices of all ranks of a test: their queues, the order in which queued kernels run, and the
effects on memory.

It reproduces the behavior of NCCL that Gloo does not have:

- A collective is queued, and the host continues. The collective runs when it is at the head of its
  stream on every rank. Each communicator has one first-in, first-out stream for collectives and
  messages. A message that was sent alone ends when its receiver reaches it.
- Inputs are read when the collective runs, not when it was issued. Results reach each rank after a
  delay of its own.
- A kernel whose peer is gone spins forever, and nothing reports this.
- A requested abort takes its time. Until it is complete, the kernel continues to write its tensors
  (with NaN, so that tests notice a use of the memory). Then the kernel has ended without an error.
- A device that has failed raises the same error on every call.

Time is counted in looks: each time a host queries a device, the devices do what is due by then. So
nothing sleeps, and the behavior follows from the seed and from the hosts' queries. The threads are
those of all ranks; the lock guards everything.
"""

from __future__ import annotations

import collections
import ctypes
import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from shoal_worker.backends.collective import Collective, execute

_PATIENCE_S = 60.0
_with_the_gil = ctypes.PyDLL(None)
"""The C library, whose functions are called without releasing the GIL."""
_PAUSE_S = 20e-6


@dataclass(eq=False)
class Kernel:
    """A collective, or a message, that one rank has queued."""

    stream: Stream
    call: Collective | None
    """None for a message."""
    peer: int = -1
    sent: torch.Tensor | None = None
    received: torch.Tensor | None = None
    issued_s: float = 0.0
    coming: bool = False
    """True if all ranks have reached it. Results are then being delivered."""
    exception: str | None = None
    """Error that the watchdog has attached to the work."""
    ended: bool = False
    """True if the kernel's end event has occurred. It reads and writes nothing any more."""

    @property
    def outputs(self) -> list[torch.Tensor]:
        if self.call is not None:
            return list(self.call.outputs)
        return [] if self.received is None else [self.received]


@dataclass(eq=False)
class Stream:
    """One rank's side of a communicator."""

    communicator: Communicator
    rank: int
    device: int
    queue: collections.deque[Kernel] = field(default_factory=collections.deque)
    aborting: bool = False
    aborted: bool = False
    finalizing: bool = False
    destroyed: bool = False
    """True if the communicator was finalized on all ranks and this rank's side was destroyed."""
    splits: int = 0
    """Number of times that this rank has split the communicator."""
    error: str | None = None
    """Error that NCCL has detected asynchronously."""


class Communicator:
    """The state shared by the ranks of an NCCL communicator."""

    def __init__(self, machine: Machine, size: int) -> None:
        self._machine = machine
        self.size = size
        self.streams: dict[int, Stream] = {}
        self.ready = False
        self.refused: str | None = None
        """NCCL error that prevents the communicator from connecting, if any."""
        self.colors: dict[int, dict[int, int]] = {}
        """Parts of each split: number of the split, then the part's number by rank."""

    def join(self, rank: int, device: int) -> Stream:
        """Adds a rank. The communicator becomes ready a few looks after the last rank has
        joined."""
        machine = self._machine
        with machine.lock:
            stream = self.streams[rank] = Stream(self, rank, device)
            machine.streams.append(stream)
            for other in self.streams.values():
                if other is not stream and other.device == device:
                    self.refused = (
                        f"Duplicate GPU detected : rank {rank} and rank {other.rank} "
                        f"both on CUDA device {device}000"
                    )
            if len(self.streams) == self.size and not machine.connecting_held:
                machine.after(machine.delay(), self.stand)
            return stream

    def stand(self) -> None:
        """Marks the communicator as ready: all ranks are connected."""
        self.ready = True

    def look(self) -> None:
        """Starts the kernels at the heads of all streams that they need."""
        heads = {
            rank: s.queue[0]
            for rank, s in self.streams.items()
            if s.queue and not s.aborting and not s.queue[0].coming
        }
        calls = {rank: kernel.call for rank, kernel in heads.items() if kernel.call is not None}
        if len(calls) == self.size and len({call.signature for call in calls.values()}) == 1:
            self._come([heads[rank] for rank in range(self.size)])
        for rank, kernel in heads.items():
            other = heads.get(kernel.peer)
            if (
                kernel.sent is not None
                and other is not None
                and other.received is not None
                and other.peer == rank
            ):
                self._come([kernel, other])

    def _come(self, kernels: list[Kernel]) -> None:
        for kernel in kernels:
            kernel.coming = True
        self._machine.after(self._machine.delay(), lambda: self._run(kernels))

    def _run(self, kernels: list[Kernel]) -> None:
        """Runs kernels that all ranks have reached. Their inputs are the current contents of
        memory."""
        if any(kernel.stream.aborting for kernel in kernels):
            for kernel in kernels:
                kernel.coming = False  # continues to spin
            return
        if kernels[0].call is None:
            sent, received = kernels[0].sent, kernels[1].received
            assert sent is not None
            assert received is not None
            copy = sent.detach().clone()
            self._machine.after(self._machine.delay(), lambda: self._end(kernels[0], []))
            self._machine.after(
                self._machine.delay(), lambda: self._end(kernels[1], [copy.view_as(received)])
            )
            return
        calls = [kernel.call for kernel in kernels if kernel.call is not None]
        copies = [_copied(call) for call in calls]
        execute(copies)
        for kernel, copied in zip(kernels, copies, strict=True):
            results = list(copied.outputs)
            self._machine.after(
                self._machine.delay(),
                lambda kernel=kernel, results=results: self._end(kernel, results),
            )

    def _end(self, kernel: Kernel, results: list[torch.Tensor]) -> None:
        if kernel.stream.aborting:
            return  # ended by the abort
        for output, result in zip(kernel.outputs, results, strict=True):
            output.data.copy_(result)
        kernel.ended = True
        assert kernel.stream.queue.popleft() is kernel
        self.look()


class Machine:
    """All devices."""

    def __init__(self, seed: int = 0, *, slowest: int = 12) -> None:
        """`slowest` is the largest number of looks that a kernel may take at each stage."""
        self.random = random.Random(seed)
        self.slowest = slowest
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.failed: dict[int, str] = {}
        """Failed devices, with CUDA's message."""
        self.connecting_held = False
        """True if communicators must not become ready."""
        self.aborts_held = False
        """True if aborts must not complete."""
        self.crashes: list[str] = []
        """Errors that would have ended a real process."""
        self.frozen: list[str] = []
        """Times at which all Python threads would have blocked: a call with the GIL waited for one
        of torch's mutexes."""
        self.freeze_s = 0.0
        """Time in seconds for which a call with the GIL really blocks when it waits for a mutex."""
        self.seconds = 0.0
        """Time in seconds as seen by watchdogs."""
        self.watchdogs: list[Callable[[], None]] = []
        self._communicators: dict[str, Communicator] = {}
        self._now = 0
        self._order = itertools.count()
        self._events: list[tuple[int, int, Callable[[], None]]] = []

    def delay(self) -> int:
        """Returns a random number of looks."""
        return self.random.randint(1, self.slowest)

    def after(self, looks: int, do: Callable[[], None]) -> None:
        """Calls `do` after this many looks."""
        with self.lock:
            heapq.heappush(self._events, (self._now + looks, next(self._order), do))

    def communicator(self, key: str, size: int) -> Communicator:
        """Returns the communicator with this key."""
        with self.lock:
            return self._communicators.setdefault(key, Communicator(self, size))

    def split(self, stream: Stream, color: int) -> Callable[[], Communicator | None]:
        """Splits a rank's communicator; all its ranks must do so. Returns a function that returns
        this rank's part, or None until all ranks have split."""
        with self.lock:
            whole, number = stream.communicator, stream.splits
            stream.splits += 1
            colors = whole.colors.setdefault(number, {})
            colors[stream.rank] = color
        key = f"{id(whole)} {number} {color}"

        def found() -> Communicator | None:
            with self.lock:
                return (
                    self.communicator(key, list(colors.values()).count(color))
                    if len(colors) == whole.size
                    else None
                )

        return found

    def look(self) -> None:
        """Advances time by one look, when a host queries a device."""
        with self.lock:
            self._now += 1
            while self._events and self._events[0][0] <= self._now:
                heapq.heappop(self._events)[2]()

    def pass_time(self, seconds: float) -> None:
        """Advances the watchdogs' time by this many seconds. Each of them then checks."""
        self.seconds += seconds
        for watchdog in self.watchdogs:
            watchdog()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Blocks a host until the condition is true."""
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {_PATIENCE_S:g} s for {what}")
            self.look()
            time.sleep(_PAUSE_S)  # other hosts are threads of this process

    def check(self, device: int) -> None:
        """Raises the error that CUDA raises on every call once a device has failed."""
        if device in self.failed:
            raise torch.AcceleratorError(f"CUDA error: {self.failed[device]}")

    def freeze(self, why: str) -> None:
        """Blocks a host that waits for a mutex and keeps the GIL."""
        self.frozen.append(why)
        _with_the_gil.usleep(int(1e6 * self.freeze_s))

    def queue(self, kernel: Kernel) -> None:
        """Queues a kernel on its stream."""
        with self.lock:
            kernel.issued_s = self.seconds
            kernel.stream.queue.append(kernel)
            if kernel.stream.aborted:
                kernel.ended = True
            kernel.stream.communicator.look()

    def begin_abort(self, stream: Stream) -> None:
        """Aborts a stream. From now on, none of its kernels completes, and after some looks all of
        them have ended."""
        with self.lock:
            if stream.aborting:
                return
            stream.aborting = True
            looks = 0
            for _ in range(3):
                looks += self.delay()
                self.after(looks, lambda: self._scribble(stream))
            if not self.aborts_held:
                self.after(looks + self.delay(), lambda: self._end_abort(stream))

    def finalize(self, stream: Stream) -> None:
        """Finalizes a stream. A few looks after every rank has finalized its stream, all of them
        are destroyed, unless one is being aborted."""
        with self.lock:
            stream.finalizing = True
            streams = list(stream.communicator.streams.values())
            if len(streams) == stream.communicator.size and all(
                each.finalizing and not each.aborting for each in streams
            ):
                for each in streams:
                    self.after(self.delay(), lambda each=each: setattr(each, "destroyed", True))

    def release_aborts(self) -> None:
        """Lets the aborts complete that `aborts_held` has delayed."""
        self.aborts_held = False
        for stream in self.streams:
            if stream.aborting:
                self.after(self.delay(), lambda stream=stream: self._end_abort(stream))

    def busy(self, device: int) -> bool:
        """Returns whether the device has a queued kernel that has not ended."""
        with self.lock:
            return any(
                not kernel.ended
                for stream in self.streams
                if stream.device == device
                for kernel in stream.queue
            )

    def _scribble(self, stream: Stream) -> None:
        """Lets a running kernel write."""
        if not stream.aborted:
            for kernel in list(stream.queue)[:1]:
                for output in kernel.outputs:
                    output.data.fill_(float("nan") if output.is_floating_point() else 77)

    def _end_abort(self, stream: Stream) -> None:
        self._scribble(stream)
        for kernel in stream.queue:
            kernel.ended = True
        stream.aborted = True


def _copied(call: Collective) -> Collective:
    """Returns a collective with copies of the tensors. One that is reduced in place has one copy
    for input and output."""
    inputs = [each.detach().clone() for each in call.inputs]
    outputs = (
        inputs if call.outputs is call.inputs else [each.detach().clone() for each in call.outputs]
    )
    return Collective(
        kind=call.kind,
        inputs=inputs,
        outputs=outputs,
        op=call.op,
        root=call.root,
        result=call.result,
    )
