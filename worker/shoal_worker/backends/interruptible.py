"""A Gloo process group that can be ended while its collectives wait.

Breaking a group's connections does not end all that waits on them. When a connection breaks in the middle of a message, Gloo tells the
operations queued before and after that message, and not the one that is at it (in Pair::signalException): that one sleeps until the group's
timeout. So callers do not wait for Gloo's work but for ours. It completes with Gloo's, or a moment after `abort` whatever Gloo does. The
moment is for the operations that were told: until they end they may write into their tensors. One that sleeps never does so again; it
is left to its timeout, and the group is destroyed after that.

Point-to-point transfers are Gloo's own: one that is cut in the middle of a message does wait for the timeout.

Threads: one thread issues collectives; they complete in Gloo's threads; `abort` is for any thread.
"""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from shoal_common.errors import MembershipChanged
from torch._C._distributed_c10d import Work

from shoal_worker.backends import reaper
from shoal_worker.backends.sockets import GroupSockets

_MOMENT_S: Final = 0.1
"""Operations that Gloo tells of a broken connection end within a millisecond, or a few when the processor is busy."""

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
        super().__init__(native.rank(), native.size())
        self.reason: str | None = None
        """Why the group is over; None: it is not."""
        self._native: dist.ProcessGroup | None = native
        self._sockets = sockets
        self._ended = ended
        self._unfinished: set[InterruptibleWork] = set()
        """What Gloo itself still has to do. It and the reason are guarded by the lock."""
        self._idle = threading.Event()
        self._idle.set()
        self._lock = threading.Lock()
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
        """Ends what is pending, here and soon at the peers, and refuses what comes: MembershipChanged(reason). Any thread; does not wait."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            unfinished = list(self._unfinished)
        self._sockets.shut_down()
        if unfinished:
            threading.Thread(target=_end, args=(unfinished, reason), name="shoal-gloo-abort", daemon=True).start()
        if self._ended is not None:
            self._ended(reason)

    def shutdown(self) -> None:
        """Ends the group and lets go of everything; what Gloo still has to do keeps it alive, but not the caller. Idempotent."""
        self.abort("the process group was shut down")
        self._closer()
        references, self._native = [self._native], None
        if references[0] is not None:
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
    reduce_scatter = _collective("reduce_scatter")
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _collective("reduce_scatter_single_coalesced")
    _reduce_scatter_base = reduce_scatter_single = _collective("reduce_scatter_single")
    scatter = _collective("scatter")

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
        """Gloo's."""
        return "gloo"

    @property
    def group_name(self) -> str:
        """The name under which torch's functional collectives know the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    # How collectives are followed.

    def _issue(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Work:
        try:
            native = getattr(self._live(), name)(*arguments, **options)
        except RuntimeError as error:
            self._raise_if_lost(name, error)
            raise
        work = InterruptibleWork(name, native, self)
        with self._lock:
            self._unfinished.add(work)
            self._idle.clear()
        native.get_future().add_done_callback(work.native_done)
        if self.reason is not None:
            _end([work], self.reason)
        return work

    def _transfer(self, name: str, arguments: tuple[Any, ...]) -> Work:
        try:
            return _Transfer(name, getattr(self._live(), name)(*arguments), self)
        except RuntimeError as error:
            self._raise_if_lost(name, error)
            raise

    def _live(self) -> dist.ProcessGroup:
        native = self._native
        if self.reason is not None or native is None:
            raise MembershipChanged(self.reason or "the process group was shut down")
        return native

    def _finished(self, work: InterruptibleWork) -> None:
        with self._lock:
            self._unfinished.discard(work)
            if not self._unfinished:
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
            raise MembershipChanged(reason) from error


class InterruptibleWork(Work):
    """A collective that was issued. It is over when Gloo's work is, or when it is ended."""

    def __init__(self, name: str, native: Work, group: InterruptibleGroup) -> None:
        super().__init__()
        self._name = name
        self._native: Work | None = native
        self._group: InterruptibleGroup | None = group
        self._over = threading.Event()
        self._value: Any = None
        self._failure: tuple[type[Exception], str] | None = None
        self._settled: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns when the result is in place; `timeout` 0: however long it takes.

        Raises MembershipChanged when the group is over, RuntimeError for other failures and when it takes longer than `timeout`.
        """
        if not self._over.wait(timeout.total_seconds() or None):
            raise RuntimeError(f"{self._name} takes longer than {timeout.total_seconds():g} s")
        self._raise_failure()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Whether the result is in place."""
        return self._over.is_set() and self._failure is None

    def result(self) -> Any:
        """The output tensors, once it is completed."""
        return self._value

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the output tensors."""
        with self._lock:
            if self._future is None:
                settled: torch.futures.Future[None] = torch.futures.Future()
                self._future = settled.then(self._outcome)
                if not self._over.is_set():
                    self._settled = settled
                    return self._future
            else:
                return self._future
        settled.set_result(None)
        return self._future

    def native_done(self, native: torch.futures.Future[Any]) -> None:
        """Gloo's work is over. Called by Gloo, in its thread."""
        group = self._group
        assert group is not None
        try:
            value, failure = native.value(), None
        except RuntimeError as error:
            reason = group._loss(self._name, error)
            value, failure = None, (RuntimeError, str(error)) if reason is None else (MembershipChanged, reason)
        group._finished(self)
        self._settle(value, failure)
        self._native = self._group = None

    def await_native(self, seconds: float) -> None:
        """Waits for Gloo's work, at most so long."""
        self._over.wait(max(0.0, seconds))

    def end(self, reason: str) -> None:
        """Ends it although Gloo's work is not over."""
        self._settle(None, (MembershipChanged, reason))

    def _settle(self, value: Any, failure: tuple[type[Exception], str] | None) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._value, self._failure = value, failure
            self._over.set()
            settled, self._settled = self._settled, None
        if settled is not None:
            settled.set_result(None)

    def _outcome(self, _: torch.futures.Future[None]) -> Any:
        self._raise_failure()
        return self._value

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

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns when the tensor was sent, or is there."""
        try:
            return bool(self._native.wait(timeout))
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


def _end(works: list[InterruptibleWork], reason: str) -> None:
    deadline = time.monotonic() + _MOMENT_S
    for work in works:
        work.await_native(deadline - time.monotonic())
    for work in works:
        work.end(reason)
