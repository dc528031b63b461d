"""The one thread that owns a shard, and how the event loop hands it work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shoal_ps_server.shard.shard import Shard

ResultT = TypeVar("ResultT")


class ShardWorker:
    """Runs calls on the shard one after another, in the order in which they were submitted. Used from the event loop."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard")

    def submit(self, call: Callable[[Shard], ResultT]) -> asyncio.Future[ResultT]:
        """Runs `call(shard)` on the shard's thread. Cancelling the future does not interrupt a call that has begun."""
        return asyncio.get_running_loop().run_in_executor(self._thread, call, self._shard)

    def close(self) -> None:
        """Ends the thread when it has done what was submitted."""
        self._thread.shutdown()
