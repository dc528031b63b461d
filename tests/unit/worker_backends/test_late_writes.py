"""After a group has ended, no tensor is returned to its caller while one of Gloo's threads may
still write into it."""

from __future__ import annotations

import ctypes
import hashlib
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from shoal_common.errors import MembershipChanged
from shoal_worker.backends.base import GroupEndedError
from shoal_worker.backends.gloo.sockets import GroupSockets, listeners
from shoal_worker.backends.gloo.works import InterruptibleWork, end_works
from shoal_worker.backends.waits import Waits
from shoal_worker.replicated.buckets import Flight

_NAME_OF_GLOOS_THREADS = b"pt_gloo_runloop"
_LONG_S = 0.5
"""Longer than an operation usually takes to end. There is no upper bound when other processes use
the cores."""


class BusyCollective:
    """A collective whose Gloo thread is running and will write into its tensor at the end."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._thread = threading.Thread(target=self._run)
        self.may_write, self._runs = threading.Event(), threading.Event()
        self._thread.start()
        assert self._runs.wait(60)

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self, timeout: timedelta) -> bool:
        if not self._future.done():
            self._thread.join(timeout.total_seconds())
        if not self._future.done():
            raise RuntimeError("Operation timed out!")
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def finish(self) -> None:
        """Lets the thread write and end."""
        self.may_write.set()
        self._thread.join()

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(15, _NAME_OF_GLOOS_THREADS, 0, 0, 0)  # PR_SET_NAME
        rows = bytes(1 << 16)
        self._runs.set()
        while not self.may_write.is_set():
            hashlib.sha256(rows)  # runs without the GIL, as Gloo does
        self._tensor.fill_(7)
        self._future.set_result([self._tensor])


class Owner:
    """A group that has ended."""

    def __init__(self) -> None:
        self.waits, self.waiter, self.timeout = Waits(), cast(Any, None), timedelta(seconds=60)

    def loss(self, name: str, error: RuntimeError) -> str | None:
        return "it has ended"

    def raise_if_lost(self, name: str, error: RuntimeError) -> None:
        raise GroupEndedError("it has ended")

    def issued(self, work: object) -> None:
        """Does nothing."""

    def finished(self, work: object) -> None:
        """Does nothing."""


class FlightGroup:
    """A group whose all-reduce returns `work`."""

    def __init__(self, work: InterruptibleWork) -> None:
        self._work = work

    def all_reduce_async(self, tensor: torch.Tensor) -> InterruptibleWork:
        return self._work

    def wait(self, work: InterruptibleWork) -> None:
        try:
            work.wait()
        except GroupEndedError as error:
            raise MembershipChanged(str(error)) from error


def test_gradients_are_not_handed_back_while_a_collective_of_an_ended_group_still_runs() -> None:
    """A gradient is returned only when no collective of an ended group can write into it any more.
    Otherwise a late write would corrupt the sums of the redo, which uses the same memory."""
    gradient = torch.zeros(4)
    native = BusyCollective(gradient)
    work = InterruptibleWork("all_reduce", cast(Any, native), cast(Any, Owner()), None)
    step = SimpleNamespace(lost=None)
    lifecycle = SimpleNamespace(mark_lost=lambda error: setattr(step, "lost", error))
    session = SimpleNamespace(step=step, group=FlightGroup(work), lifecycle=lifecycle)
    flight = Flight(cast(Any, session))
    flight.send(step, gradient)
    found: list[list[float]] = []
    landed = threading.Event()

    def land() -> None:
        flight.land(step)
        found.append(gradient.tolist())
        landed.set()

    threads = [
        threading.Thread(target=land),
        threading.Thread(target=end_works, args=([work], "a peer is gone", _nothing)),
    ]
    for thread in threads:
        thread.start()
    early = landed.wait(_LONG_S)
    native.finish()
    for thread in threads:
        thread.join()
    assert not early
    assert found == [[7.0] * 4]


def test_a_collective_of_an_ended_group_whose_thread_sleeps_is_not_waited_for() -> None:
    """Ending a group does not wait for a collective whose thread sleeps in the middle of a message,
    because it would sleep until its timeout."""
    native = SimpleNamespace(
        is_completed=lambda: False, get_future=torch.futures.Future, wait=_never
    )
    work = InterruptibleWork("all_reduce", cast(Any, native), cast(Any, Owner()), None)
    sleeps, may_end = threading.Event(), threading.Event()

    def sleep() -> None:
        ctypes.CDLL(None).prctl(15, _NAME_OF_GLOOS_THREADS, 0, 0, 0)
        sleeps.set()
        may_end.wait()

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    assert sleeps.wait(60)
    began, over = time.monotonic(), []
    end_works([work], "a peer is gone", lambda: over.append(work.is_completed()))
    assert time.monotonic() - began < 5
    assert over == [False]  # the connection is drained before the tensor is returned
    with pytest.raises(GroupEndedError, match="a peer is gone"):
        work.wait()
    may_end.set()
    sleeper.join()


def test_drained_connections_of_an_ended_group_have_nothing_to_read() -> None:
    """Draining the connections of an ended group discards data that arrived before the end, which
    the kernel would otherwise deliver to a later read."""
    before = set(listeners())
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as peer,
    ):
        (listener,) = [one for inode, one in listeners().items() if inode not in before]
        gloos, _ = server.accept()
        gloos.settimeout(10)
        with gloos:
            sockets = GroupSockets(listener, [])
            try:
                peer.sendall(b"gradients" * 1000)
                sockets.drain()
                assert gloos.recv(9) == b"gradients"  # an open group keeps its data
                sockets.shut_down()
                assert gloos.recv(9) == b"gradients"
                sockets.drain()
                assert gloos.recv(9) == b""
            finally:
                sockets.close()


def test_connections_are_drained_before_their_copies_are_released() -> None:
    before = set(listeners())
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as peer,
    ):
        (listener,) = [one for inode, one in listeners().items() if inode not in before]
        gloos, _ = server.accept()
        gloos.settimeout(10)
        with gloos:
            sockets = GroupSockets(listener, [])
            peer.sendall(b"gradients" * 1000)
            assert gloos.recv(9) == b"gradients"
            sockets.shut_down()
            sockets.close()
            assert gloos.recv(9) == b""


def _nothing() -> None:
    """Does nothing: there are no connections."""


def _never(timeout: timedelta) -> bool:
    raise RuntimeError("Operation timed out!")
