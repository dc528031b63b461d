"""Calls to servers that are made while this worker does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

AnswerT = TypeVar("AnswerT")


def in_background(call: Callable[[], AnswerT], *, name: str) -> Future[AnswerT]:
    """What `call` returns or raises, on a thread of that name. Not a pool's: the interpreter would wait for it at its end, and it may wait
    for a server."""
    future: Future[AnswerT] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
