"""Runs calls to servers on background threads, with waits that signals can interrupt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

_SLICE_S: Final = 0.2

AnswerT = TypeVar("AnswerT")


def wait_for_all(futures: Collection[Future[Any]]) -> None:
    """Waits until all futures are done, whether they succeeded or failed.

    Waits in short slices. Python runs signal handlers on the main thread between two instructions,
    so a signal does not end a wait if it arrives just before the wait begins, or on another thread
    of the process. Without slices, a worker that receives SIGTERM while the servers make it wait
    for slower workers would not notice that it must leave.
    """
    while wait(futures, timeout=_SLICE_S).not_done:
        pass


def in_background(call: Callable[[], AnswerT], *, name: str) -> Future[AnswerT]:
    """Runs `call` on a new thread called `name` and returns a future of the result.

    Does not use a thread pool: at exit, the interpreter would wait for the pool's threads, and
    `call` may be waiting for a server.
    """
    future: Future[AnswerT] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
