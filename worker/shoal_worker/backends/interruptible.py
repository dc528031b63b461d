"""A Gloo process group that can be ended while its collectives wait.

Breaking a group's connections does not end all that waits on them. When a connection breaks in the middle of a message, Gloo tells the
operations queued before and after that message, and not the one that is at it (in Pair::signalException): that one sleeps until the group's
timeout. So callers do not wait for Gloo's work but for ours. It completes with Gloo's, or a moment after `abort` whatever Gloo does. The
moment is for the operations that were told: until they end they may write into their tensors. One that sleeps (gloo_threads.py) never
does so again; it is left to its timeout, and the group is destroyed after that.

Point-to-point transfers are Gloo's own: one that is cut in the middle of a message does wait for the timeout.

Threads: one thread issues collectives; they complete in Gloo's threads; `abort` is for any thread.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReduceScatterOptions, Work
from torch.distributed.distributed_c10d import GroupName

from shoal_worker.backends import reaper
from shoal_worker.backends.errors import GroupEndedError
from shoal_worker.backends.gloo_threads import wait_until_asleep
from shoal_worker.backends.sockets import GroupSockets

_MOMENT_S: Final = 0.1
"""The longest such moment. Operations that Gloo tells of a broken connection end within a millisecond, or some under load."""

_WHILE: Final = timedelta(milliseconds=10)
"""How long a wait stays in C++ before it looks whether the group was ended."""

_MANY: Final = 64

_SOURCE_LOCATION: Final = re.compile(r"^\[[^\]]*\] ")


def cause_of(error: Exception) -> str:
    """What a library's error says, without where in its source, and without its advice."""
    first_line = _SOURCE_LOCATION.sub("", str(error).strip()).partition("\n")[0]
    return first_line.partition(". This is typically")[0] or type(error).__name__


def _collective(name: str) -> Any:
    def issue(self: InterruptibleGroup, *arguments: Any, **options: Any) -> Work:
        return self._issue(name, arguments, options)

    issue.__name__ = name
    issue.__doc__ = f"`ProcessGroup.{name}`, interruptible."
    return issue


class InterruptibleGroup(dist.ProcessGroup):
    """Issues collectives on a `native` group whose connections are `sockets`, and takes over both.

    `ended(reason)` is called once, from any thread, when the group is over: by `abort`, or by the failure of a collective.
    """

    def __init__(self, native: dist.ProcessGroup, sockets: GroupSockets, ended: Callable[[str], None] | None = None) -> None:
        super().__init__(native.rank(), native.size())  # type: ignore[call-arg]  # torch's stub knows only the other constructor
        self.reason: str | None = None
        """Why the group is over; None: it is not."""
        self._native: dist.ProcessGroup | None = native
        self._sockets = sockets
        self._ended = ended
        self._unfinished: set[InterruptibleWork] = set()
        """What Gloo itself may still have to do."""
        self._shut_down = False
        self._idle = threading.Event()
        """Set once it is shut down and Gloo has nothing left to do."""
        self._lock = threading.Lock()
        """Guards the reason and the two above."""
        self._name = native.group_name
        self._closer = weakref.finalize(self, sockets.close)

    def watch(self) -> None:
        """From now on the group ends by itself when a connection to a peer does."""
        reference = weakref.ref(self)

        def lost(what: str) -> None:
            group = reference()
            if group is not None:
                group.abort(what)

        self._sockets.watch(lost)

    def abort(self, reason: str = "the process group was aborted") -> None:
        """Ends what is pending, here and soon at the peers, and refuses what comes, with GroupEndedError(reason). Any thread."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            unfinished = [work for work in self._unfinished if not work.native_completed]
        self._sockets.shut_down()
        if unfinished:
            threading.Thread(target=_end, args=(unfinished, reason), name="shoal-gloo-abort", daemon=True).start()
        if self._ended is not None:
            self._ended(reason)

    def shutdown(self) -> None:
        """Ends the group and lets go of everything; what Gloo still has to do keeps it alive, but not the caller. Idempotent."""
        self.abort("the process group was shut down")
        self._closer()
        references: list[object] = [self._native]
        self._native = None
        if references[0] is None:
            return
        with self._lock:
            self._shut_down = True
            unfinished = self._unfinished = {work for work in self._unfinished if not work.native_completed}
            if not unfinished:
                self._idle.set()
        for work in list(unfinished):
            work.follow()
        reaper.drop(references, when=self._idle)

    allgather = _collective("allgather")
    allgather_coalesced = _collective("allgather_coalesced")
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _collective("all_gather_single_coalesced")
    _allgather_base = all_gather_single = _collective("all_gather_single")
    allreduce = _collective("allreduce")
    allreduce_coalesced = _collective("allreduce_coalesced")
    alltoall = _collective("alltoall")
    alltoall_base = all_to_all_single = _collective("all_to_all_single")
    barrier = _collective("barrier")
    broadcast = _collective("broadcast")
    gather = _collective("gather")
    reduce = _collective("reduce")
    scatter = _collective("scatter")

    # Gloo's reduce-scatter is an all-reduce of which each rank then takes its part: twice the bytes, and a work without a future. Here
    # each rank gets its parts from all others and sums them itself.

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: ReduceScatterOptions | None = None) -> Work:
        """`ProcessGroup.reduce_scatter_single`, interruptible."""
        return self._reduce_scatter([output], input.reshape(self.size(), -1), opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: ReduceScatterOptions | None = None
    ) -> Work:
        """`ProcessGroup.reduce_scatter_single_coalesced`, interruptible."""
        return self._reduce_scatter(outputs, torch.cat([one.reshape(self.size(), -1) for one in inputs], dim=1), opts)

    def reduce_scatter(  # type: ignore[override]  # torch's other overload is for Python callers alone
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: ReduceScatterOptions | None = None
    ) -> Work:
        """`ProcessGroup.reduce_scatter`, interruptible. Its parts must be of one size."""
        return self._reduce_scatter(outputs, torch.stack([part.reshape(-1) for part in inputs[0]]), opts)

    _reduce_scatter_base: Any = reduce_scatter_single
    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> Work:  # noqa: N803 - torch's names
        """`ProcessGroup.send`."""
        return self._transfer("send", (tensors, dstRank, tag))

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> Work:  # noqa: N803 - torch's names
        """`ProcessGroup.recv`."""
        return self._transfer("recv", (tensors, srcRank, tag))

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work:
        """`ProcessGroup.recv_anysource`."""
        return self._transfer("recv_anysource", (tensors, tag))

    # What torch asks of a process group written in Python.

    def getBackendName(self) -> str:  # noqa: N802 - looked up by this name
        """Not "gloo": torch would look for a C++ backend of that name in here."""
        return "shoal_gloo"

    @property
    def group_name(self) -> GroupName:
        """The name under which torch's functional collectives know the group."""
        return self._name

    def _set_group_name(self, name: GroupName) -> None:
        self._name = name

    # How collectives are followed.

    def _reduce_scatter(self, outputs: list[torch.Tensor], parts: torch.Tensor, opts: ReduceScatterOptions | None) -> Work:
        """`parts`: (ranks, elements), the row of a rank is for it. The outputs hold one row between them."""
        reduce = _reduction(dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        received = torch.empty_like(parts)

        def finish() -> list[torch.Tensor]:
            reduced = reduce(received)
            for output, part in zip(outputs, reduced.split([output.numel() for output in outputs]), strict=True):
                output.copy_(part.view_as(output))
            return outputs

        rows: list[int] = []
        return self._issue("all_to_all_single", (received, parts.contiguous(), rows, rows), {}, finish)

    def _issue(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any], finish: Callable[[], Any] | None = None) -> Work:
        """`finish` runs once Gloo is done, and gives the value of the work's future."""
        try:
            native = getattr(self._live(), name)(*arguments, **options)
        except RuntimeError as error:
            self._raise_if_lost(name, error)
            raise
        work = InterruptibleWork(name, native, self, finish)
        with self._lock:
            if len(self._unfinished) >= _MANY:
                # Works that nobody waited for.
                self._unfinished = {known for known in self._unfinished if not known.native_completed}
            self._unfinished.add(work)
        if self.reason is not None:
            _end([work], self.reason)
        return work

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """`ProcessGroup.monitored_barrier`; not interruptible."""
        self._live().monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]  # missing in torch's stub

    def _transfer(self, name: str, arguments: tuple[Any, ...]) -> Work:
        try:
            return _Transfer(name, getattr(self._live(), name)(*arguments), self)
        except RuntimeError as error:
            self._raise_if_lost(name, error)
            raise

    def _live(self) -> dist.ProcessGroup:
        native = self._native
        if self.reason is not None or native is None:
            raise GroupEndedError(self.reason or "the process group was shut down")
        return native

    def _finished(self, work: InterruptibleWork) -> None:
        with self._lock:
            self._unfinished.discard(work)
            if self._shut_down and not self._unfinished:
                self._idle.set()

    def _loss(self, name: str, error: RuntimeError) -> str | None:
        """Why the group is over after this error: all later collectives fail too, and peers must hear of it now, not at their timeout.

        None for other errors (an unsupported dtype, say): they are the caller's, and leave the group as it is.
        """
        if self.reason is None and "gloo/transport" in str(error):
            self.abort(f"{name} on rank {self.rank()} of {self.size()} failed: {cause_of(error)}")
        return self.reason

    def _raise_if_lost(self, name: str, error: RuntimeError) -> None:
        reason = self._loss(name, error)
        if reason is not None:
            raise GroupEndedError(reason) from error


def _reduction(op: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """How the first dimension of a tensor, the rank it came from, is reduced."""
    pairwise: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        dist.ReduceOp.PRODUCT: torch.mul,
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }
    if op == dist.ReduceOp.SUM:
        return lambda parts: parts.sum(0, dtype=parts.dtype)
    if op == dist.ReduceOp.AVG:
        return lambda parts: parts.mean(0)
    if op == dist.ReduceOp.MIN:
        return lambda parts: parts.amin(0)
    if op == dist.ReduceOp.MAX:
        return lambda parts: parts.amax(0)
    for known, combine in pairwise.items():
        if op == known:
            return lambda parts: functools.reduce(combine, parts.unbind(0))
    raise ValueError(f"Gloo's reduce_scatter cannot reduce with {op}")


class InterruptibleWork(Work):
    """A collective that was issued. It is over when Gloo's work is, or when it is ended."""

    def __init__(self, name: str, native: Work, group: InterruptibleGroup, finish: Callable[[], Any] | None) -> None:
        super().__init__()
        self._name = name
        self._native: Work | None = native
        self._group: InterruptibleGroup | None = group
        self._finish = finish
        self._over = threading.Event()
        self._value: Callable[[], Any] = lambda: None
        self._failure: tuple[type[Exception], str] | None = None
        self._settled: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._followed = False
        self._lock = threading.Lock()
        """Guards all of the above."""
        self._finishing = threading.Lock()
        """Held while the result is put in place, so that it never is after an end."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the result is in place; `timeout` None or 0: however long it takes.

        Raises GroupEndedError when the group is over, RuntimeError for other failures and when it takes longer than `timeout`.
        """
        deadline = time.monotonic() + timeout.total_seconds() if timeout else float("inf")
        while not self._over.is_set():
            self._wait_for_native()
            if time.monotonic() >= deadline and not self._over.is_set():
                raise RuntimeError(f"{self._name} takes longer than {timeout}")
        self._raise_failure()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._over.is_set() or self.native_completed

    def is_success(self) -> bool:
        """Whether `wait` has returned."""
        return self._over.is_set() and self._failure is None

    def result(self) -> Any:
        """The output tensors, once `wait` has returned."""
        return self._value()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the output tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            settled: torch.futures.Future[None] = torch.futures.Future()
            future = self._future = settled.then(self._outcome)
            over = self._over.is_set()
            if not over:
                self._settled = settled
        if over:
            settled.set_result(None)
        else:
            self.follow()
        return future

    @property
    def native_completed(self) -> bool:
        """Whether Gloo is done."""
        native = self._native
        return native is None or bool(native.is_completed())

    def follow(self) -> None:
        """From now on it is over by itself when Gloo is done, also if nobody waits."""
        with self._lock:
            native, followed, self._followed = self._native, self._followed, True
        if native is not None and not followed:
            native.get_future().add_done_callback(self._native_done)

    def await_native(self, seconds: float) -> None:
        """Waits for Gloo to be done or to be found asleep, at most so long."""
        wait_until_asleep(self._over, seconds)

    def end(self, reason: str) -> None:
        """Ends it although Gloo is not done."""
        with self._finishing:
            settled = self._settle(lambda: None, (GroupEndedError, reason))
        _complete(settled)

    def _wait_for_native(self) -> None:
        """Waits a while in C++, which is the quickest to notice that Gloo is done; but it does not notice an end."""
        native = self._native
        if native is None:
            self._over.wait(_WHILE.total_seconds())
            return
        with contextlib.suppress(RuntimeError):  # "Operation timed out!", or its failure
            native.wait(_WHILE)
        if native.is_completed():
            self._native_is_done(native)

    def _native_done(self, _: torch.futures.Future[Any]) -> None:
        """Called by Gloo, in its thread."""
        native = self._native
        if native is not None:
            self._native_is_done(native)

    def _native_is_done(self, native: Work) -> None:
        """Comes from the thread that waits, from Gloo's, or from both."""
        settled = None
        with self._finishing:
            group, finish = self._group, self._finish
            if group is None:
                return
            if not self._over.is_set():
                settled = self._settle(*self._native_outcome(native, group, finish))
            self._native = self._group = self._finish = None
        group._finished(self)
        _complete(settled)

    def _native_outcome(
        self, native: Work, group: InterruptibleGroup, finish: Callable[[], Any] | None
    ) -> tuple[Callable[[], Any], tuple[type[Exception], str] | None]:
        try:
            future = native.get_future()  # complete a little earlier than the work itself
            future.wait()
            if finish is None:
                return future.value, None
            value = finish()
            return lambda: value, None
        except RuntimeError as error:
            reason = group._loss(self._name, error)
            return lambda: None, (RuntimeError, str(error)) if reason is None else (GroupEndedError, reason)

    def _settle(self, value: Callable[[], Any], failure: tuple[type[Exception], str] | None) -> torch.futures.Future[None] | None:
        """The first call counts. Returns what is to be completed, without any lock: it runs the callbacks of others."""
        with self._lock:
            if self._over.is_set():
                return None
            self._value, self._failure = value, failure
            self._over.set()
            settled, self._settled = self._settled, None
            return settled

    def _outcome(self, _: torch.futures.Future[None]) -> Any:
        self._raise_failure()
        return self._value()

    def _raise_failure(self) -> None:
        """A new error each time: one that is kept would keep, by its traceback, all that the caller had."""
        if self._failure is not None:
            kind, text = self._failure
            raise kind(text)


class _Transfer(Work):
    """A point-to-point transfer."""

    def __init__(self, name: str, native: Work, group: InterruptibleGroup) -> None:
        super().__init__()
        self._name = name
        self._native = native
        self._group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the tensor was sent, or is there."""
        try:
            return bool(self._native.wait(timeout or timedelta(0)))
        except RuntimeError as error:
            self._group._raise_if_lost(self._name, error)
            raise

    def is_completed(self) -> bool:
        """Whether `wait` has returned."""
        return bool(self._native.is_completed())

    def source_rank(self) -> int:
        """Who sent what `recv_anysource` received."""
        return int(self._native._source_rank())

    _source_rank = source_rank


def _complete(settled: torch.futures.Future[None] | None) -> None:
    if settled is not None:
        settled.set_result(None)


def _end(works: list[InterruptibleWork], reason: str) -> None:
    deadline = time.monotonic() + _MOMENT_S
    for work in works:
        work.follow()
    for work in works:
        work.await_native(deadline - time.monotonic())
    for work in works:
        work.end(reason)
