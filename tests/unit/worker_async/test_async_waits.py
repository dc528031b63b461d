"""The training thread handles signals while it waits for its calls to servers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from shoal_worker.parameter_servers.background import wait_for_all

_LATE_S = 30.0


@pytest.fixture
def heard() -> Iterator[Future[str]]:
    """A future that the handler of SIGUSR1 completes."""
    future: Future[str] = Future()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: future.set_result("heard"))
    yield future
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_did_not_wake_the_waiting_thread_is_heard(heard: Future[str]) -> None:
    # The signal simulates one that arrives just before the wait begins, which does not wake the
    # main thread.
    late = threading.Timer(
        _LATE_S, lambda: heard.done() or heard.set_result("only when the wait was over")
    )
    late.start()
    elsewhere = threading.Timer(
        0.5, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    )
    elsewhere.start()
    wait_for_all([heard])
    late.cancel()
    assert heard.result() == "heard"


def test_all_are_waited_for_whatever_comes_of_them() -> None:
    failing: Future[None] = Future()
    slow: Future[str] = Future()
    failing.set_exception(ValueError("refused"))
    threading.Timer(0.5, slow.set_result, ["there"]).start()
    wait_for_all([failing, slow])
    assert slow.done()
