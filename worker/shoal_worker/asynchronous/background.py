"""Calls to servers that are made on other threads, and waits for them that signals can
interrupt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

_SLICE_S: Final = 0.2

AnswerT = TypeVar("AnswerT")


def wait_for_all(futures: Collection[Future[Any]]) -> None:
    """Returns when all of them are done, whatever came of them.

    In slices: Python runs the handler of a signal on the main thread, between two instructions. A
    signal that comes just before that thread begins to wait, or to another thread of the process,
    does not wake it. A worker that was told to leave by SIGTERM would not hear of it as long as the
    servers let it wait for slower workers.
    """
    while wait(futures, timeout=_SLICE_S).not_done:
        pass


def in_background(call: Callable[[], AnswerT], *, name: str) -> Future[AnswerT]:
    """What `call` returns or raises, on a thread of that name. Not a pool's: the interpreter would
    wait for it at its end, and it may wait for a server."""
    future: Future[AnswerT] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
