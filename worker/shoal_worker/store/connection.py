"""What the stores of one process that were derived from each other share: a Redis client, its scripts, and the wake-ups.

Threads: all of it may be used from any thread; redis-py's client takes a connection from its pool for each command.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Final

from shoal_common.redis import RedisSettings, connect

from shoal_worker.store import scripts
from shoal_worker.store.wakeups import Wakeups

_COMMAND_TIMEOUT: Final = timedelta(seconds=5)


class StoreConnection:
    """A client whose server has answered, counted by the stores that use it."""

    def __init__(self, url: str) -> None:
        # No retries in the client: it cannot tell which commands may be repeated; the store does.
        self.client = connect(RedisSettings(url=url, command_timeout=_COMMAND_TIMEOUT, retries=0))
        self.wakeups = Wakeups(self.client)
        self.set = self.client.register_script(scripts.SET)
        self.add = self.client.register_script(scripts.ADD)
        self.append = self.client.register_script(scripts.APPEND)
        self.compare_set = self.client.register_script(scripts.COMPARE_SET)
        self.queue_push = self.client.register_script(scripts.QUEUE_PUSH)
        where = self.client.connection_pool.connection_kwargs
        self.server: tuple[str, int] | None = (where["host"], int(where.get("port", 6379))) if "host" in where else None
        self._users = 0
        self._lock = threading.Lock()

    def retain(self) -> None:
        with self._lock:
            self._users += 1

    def release(self, *, wait: bool) -> None:
        """One user less. The last one closes the connections: to the end if `wait`, else without any I/O (garbage collector)."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        if wait:
            self.wakeups.join()
            self.client.close()
        else:
            self.wakeups.stop()
