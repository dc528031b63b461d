"""Cancels tasks of an event loop reliably."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any, Final

logger = logging.getLogger(__name__)

_AGAIN_S: Final = 0.2


async def end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancels tasks, repeatedly if necessary, until all have ended. The code that awaits the tasks
    must handle their results and errors.

    A single cancellation may be lost if the operation that the task awaits completes at the same
    time. Python 3.11's asyncio.wait_for loses it (python/cpython issue 86296), and redis-py sends
    every command through asyncio.wait_for.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
        if pending:
            logger.info(
                "tasks did not end when they were cancelled, and were cancelled again: %s",
                ", ".join(sorted(task.get_name() for task in pending)),
            )
    await asyncio.gather(*tasks, return_exceptions=True)
