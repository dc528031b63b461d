"""A key-value store for torch (`torch.distributed.Store`) in Redis. No rank hosts the store, so it
survives the death of any rank.

Each store is one Redis hash, named by its prefix. Every job and generation has its own prefix,
which is never used again. Nothing is pickled: keys are strings, values are bytes. The coordinator
chooses new prefixes; for plain scripts, rendezvous.py does.

Threads: every method may be called from any thread, including Gloo's, and a blocked wait does not
block other threads. `abort` ends all blocked waits of a store immediately. A wait blocks until a
message announces that the key was written (wakeups.py), and checks the key every 0.5 s in case that
message is lost. If Redis does not respond, the wait keeps trying until its deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

import redis
from redis.commands.core import Script
from shoal_common.errors import ConfigurationError
from shoal_common.redis import RedisSettings, connect
from torch.distributed import QueueEmptyError
from torch.distributed.distributed_c10d import Store

from shoal_worker.store import scripts
from shoal_worker.store.errors import (
    StoreAbortedError,
    StoreTimeoutError,
    StoreUnavailableError,
    StoreValueError,
)
from shoal_worker.store.wakeups import Wakeups

# ------------------------------------------------------------------------ shared by derived stores

_COMMAND_TIMEOUT: Final = timedelta(seconds=5)


class StoreConnection:
    """Connection to a Redis server that has responded at least once, shared by several stores."""

    def __init__(self, url: str) -> None:
        # The client makes no retries, because it does not know which commands are safe to retry.
        # The store does.
        self.client = connect(RedisSettings(url=url, command_timeout=_COMMAND_TIMEOUT, retries=0))
        self.wakeups = Wakeups(self.client)
        self.set = self.client.register_script(scripts.SET)
        self.add = self.client.register_script(scripts.ADD)
        self.append = self.client.register_script(scripts.APPEND)
        self.compare_set = self.client.register_script(scripts.COMPARE_SET)
        self.queue_push = self.client.register_script(scripts.QUEUE_PUSH)
        where = self.client.connection_pool.connection_kwargs
        self.server: tuple[str, int] | None = (
            (where["host"], int(where.get("port", 6379))) if "host" in where else None
        )
        self._users = 0
        self._lock = threading.Lock()

    def retain(self) -> None:
        with self._lock:
            self._users += 1

    def release(self, *, wait: bool) -> None:
        """Releases one store's reference. The last release closes the connections. `wait`: True to
        wait until the listener has ended; False to wait for nothing, as is required when the
        garbage collector calls this. The listener then closes its own connection a little later."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        if wait:
            self.wakeups.join()
            self.client.close()
        else:
            self.wakeups.stop()
            # Not left to the client's own finalizer: in a reference cycle, the sockets' finalizers
            # may run before it, and warn.
            self.client.connection_pool.disconnect(inuse_connections=False)


# ---------------------------------------------------------------------------------------- the store

T = TypeVar("T")

DEFAULT_TIMEOUT: Final = timedelta(seconds=300)
"""torch's default timeout."""
DEFAULT_LIFETIME: Final = timedelta(days=1)
_RECHECK_S: Final = 0.5
_ATTEMPTS: Final = 3
_BACKOFF_S: Final = 0.05
_BROKEN: Final = (redis.ConnectionError, redis.TimeoutError)


class RedisStore(Store):
    """A torch store in the Redis hash `prefix` of the server at `url` (redis://, rediss:// or
    unix://).

    `timeout`: time limit of get, wait, multi_get and queue_pop. `lifetime`: time after the last
    write at which Redis deletes the entire store. The caller must keep a reference for as long as
    C++ code uses the store, because torch's process groups and PrefixStore keep only the C++ half
    of the object alive.

    Raises ConfigurationError (invalid URL or prefix), AuthenticationError or UnavailableError.
    """

    def __init__(
        self,
        url: str,
        prefix: str,
        *,
        timeout: timedelta = DEFAULT_TIMEOUT,
        lifetime: timedelta = DEFAULT_LIFETIME,
    ) -> None:
        _check(prefix, timeout, lifetime)
        self._set_up(StoreConnection(url), prefix, timeout, lifetime)

    def _set_up(
        self, connection: StoreConnection, prefix: str, timeout: timedelta, lifetime: timedelta
    ) -> None:
        Store.__init__(self)
        self.set_timeout(timeout)
        self.prefix = prefix
        self._lifetime = lifetime
        self._channels = f"{prefix}:wake:"
        self._abort = _Abort()
        self._connection = connection
        connection.retain()
        self._release = weakref.finalize(self, connection.release, wait=False)

    # --- values of keys

    def set(self, key: str, value: str | bytes) -> None:
        """Sets `key` and wakes all waits for it."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Sets all keys atomically, and wakes all waits for them."""
        if len(keys) != len(values):
            raise StoreValueError(
                f"multi_set got {len(keys)} keys and {len(values)} values; expected equal numbers"
            )
        pairs = [part for key, value in zip(keys, values, strict=True) for part in (key, value)]
        if pairs:
            self._script(self._connection.set, self.prefix, *pairs, repeatable=True)

    def get(self, key: str) -> bytes:
        """Returns the value of `key`. Waits for the key; raises StoreTimeoutError after the store's
        timeout."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values of all keys. Waits until all keys exist."""
        return self._wait_for_values(list(keys), self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist. Raises StoreTimeoutError, which names the missing keys, after
        `timeout` (default: the store's timeout)."""
        self._wait_for_values(list(keys), self.timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys exist."""
        return None not in self._look(list(keys))

    def add(self, key: str, amount: int) -> int:
        """Adds `amount` to the number in `key` (0 if absent) and returns the sum. Not retried after
        a broken connection, because `amount` might then be added twice."""
        try:
            return int(self._write(self._connection.add, key, int(amount)))
        except redis.ResponseError as error:
            raise StoreValueError(
                f"add to key {key!r} of store {self.prefix!r}: its value is not an integer "
                f"({error})"
            ) from error

    def append(self, key: str, value: str | bytes) -> None:
        """Appends to the value of `key` (empty if absent). Not retried after a broken
        connection."""
        self._write(self._connection.append, key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Sets `key` to `desired` if its value is `expected`, or if the key is absent and
        `expected` is empty.

        Returns the resulting value. For an absent key that was not set, returns `expected`, as
        torch's own stores do.
        """
        return bytes(self._write(self._connection.compare_set, key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """Deletes `key` and returns whether the key existed."""
        return bool(
            self._command(lambda: self._connection.client.hdel(self.prefix, key), repeatable=False)
        )

    def num_keys(self) -> int:
        """Returns the number of keys, not counting queues."""
        return int(
            self._command(lambda: self._connection.client.hlen(self.prefix), repeatable=True)
        )

    def list_keys(self) -> list[str]:
        """Returns all keys, in no particular order."""
        keys = self._command(lambda: self._connection.client.hkeys(self.prefix), repeatable=True)
        return [cast(bytes, key).decode() for key in keys]

    def has_extended_api(self) -> bool:
        """Returns True, because the store supports append, multi_get and multi_set."""
        return True

    # The names that torch's C++ code uses for these two methods of a Python store.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    # --- queues

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Appends `value` to the queue `key`. Not retried after a broken connection."""
        self._script(self._connection.queue_push, self._queue(key), key, value, repeatable=False)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Removes and returns the first item of the queue `key`. If the queue is empty, waits up to
        the store's timeout or, with `block=False`, raises QueueEmptyError.

        If the connection breaks just as Redis returns an item, that item is lost, because Redis
        cannot tell whether it was delivered.
        """

        def pop() -> bytes | None:
            return self._command(
                lambda: cast("bytes | None", self._connection.client.lpop(self._queue(key))),
                repeatable=False,
            )

        item = self._wait_until(pop, lambda: [key], self.timeout) if block else pop()
        if item is None:
            raise QueueEmptyError(f"queue {key!r} of store {self.prefix!r} is empty")
        return item

    def queue_len(self, key: str) -> int:
        """Returns the number of items in the queue."""
        return int(
            self._command(lambda: self._connection.client.llen(self._queue(key)), repeatable=True)
        )

    # --- the store itself

    @property
    def server(self) -> tuple[str, int] | None:
        """Host and port of the Redis server; None for a Unix socket."""
        return self._connection.server

    @property
    def timeout(self) -> timedelta:
        """Time limit of waits; changed by `set_timeout`."""
        return cast(timedelta, super().timeout)  # type: ignore[misc]  # torch's stub lacks it

    def clone(self) -> RedisStore:
        """Returns this store itself, which may be used from any thread.

        C++ would refer only to the C++ half of a copy, so the copy's Python half would be freed
        immediately.
        """
        return self

    def with_prefix(self, prefix: str) -> RedisStore:
        """Returns a store with different keys, for the next generation. It shares the connections,
        but is aborted separately."""
        _check(prefix, self.timeout, self._lifetime)
        derived = RedisStore.__new__(RedisStore)
        derived._set_up(self._connection, prefix, self.timeout, self._lifetime)
        return derived

    def abort(self, reason: str) -> None:
        """Makes every blocked and every later call on this store raise StoreAbortedError(reason).
        Does no I/O. May be called from any thread."""
        callbacks = self._abort.begin(reason)
        self._connection.wakeups.wake_all()
        for callback in callbacks:
            callback(reason)

    @contextlib.contextmanager
    def on_abort(self, callback: Callable[[str], None]) -> Iterator[None]:
        """Context in which `abort` also calls `callback(reason)`, on the thread that calls `abort`.
        If the store has already been aborted, calls `callback` immediately."""
        reason = self._abort.add(callback)
        if reason is not None:
            callback(reason)
        try:
            yield
        finally:
            self._abort.remove(callback)

    def run_script(self, script: str, *arguments: str | bytes | int) -> Any:
        """Runs a Lua script of this package with this store's prefix as its key. ARGV[1] is the
        store's lifetime, ARGV[2] the prefix of its channels, and `arguments` follow.

        The script must be safe to retry. Meant for operations that a key-value store does not have,
        such as the agreement of ranks on a round of a rendezvous.
        """
        return self._script(
            self._connection.client.register_script(script),
            self.prefix,
            *arguments,
            repeatable=True,
        )

    def watch_writes(self, key: str) -> contextlib.AbstractContextManager[threading.Event]:
        """Returns an event that is set soon after each write of `key`, and when the store is
        aborted. The caller must also check the key every second, because a notification can be
        lost."""
        return self._connection.wakeups.watch(self._channels + key)

    def discard(self) -> None:
        """Deletes all keys of the store on the server, but not its queues. Must be called only when
        no process needs the keys any more."""
        self._command(lambda: self._connection.client.unlink(self.prefix), repeatable=True)

    def close(self) -> None:
        """Aborts the store. If no other store shares its connections, closes them and stops their
        thread. Idempotent."""
        self.abort(f"store {self.prefix!r} is closed")
        if self._release.detach() is not None:
            self._connection.release(wait=True)

    # --- sending commands and waiting

    def _write(self, script: Script, key: str, *arguments: str | bytes | int) -> Any:
        return self._script(script, self.prefix, key, *arguments, repeatable=False)

    def _script(
        self, script: Script, target: str, *arguments: str | bytes | int, repeatable: bool
    ) -> Any:
        header = (max(1, int(self._lifetime.total_seconds())), self._channels)
        return self._command(
            lambda: script(keys=[target], args=[*header, *arguments]), repeatable=repeatable
        )

    def _queue(self, key: str) -> str:
        return f"{self.prefix}:queue:{key}"

    def _look(self, keys: list[str]) -> list[bytes | None]:
        if not keys:
            return []
        values = self._command(
            lambda: self._connection.client.hmget(self.prefix, keys), repeatable=True
        )
        return cast("list[bytes | None]", values)

    def _command(self, send: Callable[[], T], *, repeatable: bool) -> T:
        """Sends one command. `repeatable`: True if the command may be retried after a broken
        connection."""
        attempts = _ATTEMPTS if repeatable else 1
        for attempt in range(attempts):
            self._raise_if_aborted()
            try:
                return send()
            except _BROKEN as error:
                if attempt + 1 == attempts:
                    raise StoreUnavailableError(
                        f"store {self.prefix!r}: Redis did not respond ({error}) in {attempts} "
                        "attempt(s)",
                        reason="REDIS_UNAVAILABLE",
                    ) from error
                time.sleep(_BACKOFF_S * 2**attempt)
            except redis.RedisError:
                raise
            except Exception as error:
                # `close` on another thread removes the connection in the middle of a command, and
                # redis-py reports this in many ways.
                self._raise_if_aborted(error)
                raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _wait_for_values(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        values: dict[str, bytes] = {}

        def absent() -> list[str]:
            return [key for key in keys if key not in values]

        def look() -> list[bytes] | None:
            wanted = absent()
            values.update(
                {
                    key: value
                    for key, value in zip(wanted, self._look(wanted), strict=True)
                    if value is not None
                }
            )
            return [values[key] for key in keys] if not absent() else None

        return self._wait_until(look, absent, timeout)

    def _wait_until(
        self, attempt: Callable[[], T | None], absent: Callable[[], list[str]], timeout: timedelta
    ) -> T:
        """Calls `attempt` immediately, and then whenever the first absent key may have been
        written, until it returns a value. `absent`: returns the keys that do not exist yet. Raises
        StoreTimeoutError after `timeout`."""
        deadline = time.monotonic() + timeout.total_seconds()
        found = self._attempt_before(deadline, attempt)
        while found is None:
            key = absent()[0]
            with self._connection.wakeups.watch(self._channels + key) as written:
                while found is None and key in absent():
                    written.clear()
                    found = self._attempt_before(deadline, attempt)
                    if found is not None or key not in absent():
                        break
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        self._raise_timeout(absent(), timeout)
                    written.wait(min(remaining, _RECHECK_S))
        return found

    def _attempt_before(self, deadline: float, attempt: Callable[[], T | None]) -> T | None:
        """Calls `attempt` once. Before the deadline, returns None if the server is unavailable, as
        for a missing value."""
        try:
            return attempt()
        except StoreUnavailableError:
            if time.monotonic() >= deadline:
                raise
            return None

    def _raise_timeout(self, absent: list[str], timeout: timedelta) -> None:
        named = ", ".join(repr(key) for key in absent[:5]) + (
            f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        )
        raise StoreTimeoutError(
            f"store {self.prefix!r}: waited {timeout.total_seconds():g} s for {named}, but no "
            "rank wrote it; check that the rank that should write it is running"
        )

    def _raise_if_aborted(self, cause: Exception | None = None) -> None:
        if self._abort.reason is not None:
            raise StoreAbortedError(self._abort.reason) from cause


class _Abort:
    """The reason why a store was aborted (None if it was not), and the callbacks to call when it
    is. Only the first reason is kept."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._callbacks: list[Callable[[str], None]] = []
        self._lock = threading.Lock()

    def begin(self, reason: str) -> list[Callable[[str], None]]:
        """Sets the reason and returns the callbacks. Returns no callbacks if a reason has already
        been set."""
        with self._lock:
            if self.reason is not None:
                return []
            self.reason = reason
            return list(self._callbacks)

    def add(self, callback: Callable[[str], None]) -> str | None:
        with self._lock:
            self._callbacks.append(callback)
            return self.reason

    def remove(self, callback: Callable[[str], None]) -> None:
        with self._lock:
            self._callbacks.remove(callback)


def _check(prefix: str, timeout: timedelta, lifetime: timedelta) -> None:
    if not prefix:
        raise ConfigurationError(
            "prefix='': expected a name unique to this group, such as 'shoal:{job}:store:3-9f2c'"
        )
    if timeout <= timedelta(0):
        raise ConfigurationError(f"timeout={timeout}: expected more than 0 s")
    if lifetime < timedelta(minutes=1):
        raise ConfigurationError(
            f"lifetime={lifetime}: expected at least a minute, because the store would otherwise "
            "expire while in use"
        )
