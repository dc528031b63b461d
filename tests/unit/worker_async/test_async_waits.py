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
def handled() -> Iterator[Future[str]]:
    """A future that the handler of SIGUSR1 completes."""
    future: Future[str] = Future()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: future.set_result("handled"))
    yield future
    signal.signal(signal.SIGUSR1, before)


def test_signal_is_handled_although_it_did_not_wake_the_waiting_thread(
    handled: Future[str],
) -> None:
    # The signal simulates one that arrives just before the wait begins, which does not wake the
    # main thread.
    late = threading.Timer(
        _LATE_S, lambda: handled.done() or handled.set_result("only when the wait was over")
    )
    late.start()
    elsewhere = threading.Timer(
        0.5, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    )
    elsewhere.start()
    wait_for_all([handled])
    late.cancel()
    assert handled.result() == "handled"


def test_all_waits_are_completed_whatever_their_outcome() -> None:
    failing: Future[None] = Future()
    slow: Future[str] = Future()
    failing.set_exception(ValueError("refused"))
    threading.Timer(0.5, slow.set_result, ["there"]).start()
    wait_for_all([failing, slow])
    assert slow.done()
