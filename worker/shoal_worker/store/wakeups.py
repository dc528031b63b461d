"""Wakes waits on a Redis store as soon as a key is written, without polling.

Every write publishes a message on its key's channel. Each Redis client has one listener thread,
which owns the only subscribed connection. A wait registers the channel and gets a `threading.Event`
that the listener sets. Messages can be lost with a broken connection, so a wait must also check
periodically: this module is fast but not reliable. It does not depend on the meaning of keys and
values.

Threads: any thread may call `watch` and `wake_all`. The subscription belongs to the listener
thread; other threads reach the listener with a message to its inbox channel. The listener starts
with the first wait, and stops a few seconds after the last wait, or within LISTEN_TIMEOUT_S of
`stop`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any, Final

import redis

_LOG: Final = logging.getLogger(__name__)

LISTEN_TIMEOUT_S: Final = 0.5
"""Maximum interval between the listener's checks of the required channels, in seconds. Also the
maximum time that the listener takes to stop."""
_RECONNECT_PAUSE_S: Final = 0.1
_LINGER_S: Final = 5.0
"""Time that the listener continues without waits, in seconds. Ranks wait often while a group forms,
and never during training."""


class Wakeups:
    """Wakes this process's waits for keys on one Redis server."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._inbox = f"shoal:wakeups:{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._waits: dict[str, set[threading.Event]] = {}
        """Events of the waits, by channel. Guarded by the lock."""
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    @contextlib.contextmanager
    def watch(self, channel: str) -> Iterator[threading.Event]:
        """Yields an event. It is set by each message on `channel`, by `wake_all`, and when
        listening starts.

        Because it is set when listening starts, a caller that clears the event, checks the key, and
        then waits cannot miss a write.
        """
        event = threading.Event()
        with self._lock:
            self._waits.setdefault(channel, set()).add(event)
            listening = self._thread is not None
            if not listening:
                self._thread = threading.Thread(
                    target=self._listen, name="shoal-store-wakeups", daemon=True
                )
                self._thread.start()
        if listening:
            self._poke()
        try:
            yield event
        finally:
            with self._lock:
                self._waits[channel].discard(event)
                if not self._waits[channel]:
                    del self._waits[channel]

    def wake_all(self) -> None:
        """Sets every event, so that each wait checks again immediately. Does no I/O."""
        with self._lock:
            for events in self._waits.values():
                for event in events:
                    event.set()

    def stop(self) -> None:
        """Makes the listener stop soon. Does no I/O and does not wait, so that a finalizer can call
        it."""
        self._stopped.set()
        self.wake_all()

    def join(self) -> None:
        """Stops the listener and waits until its thread has ended."""
        self.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._poke()
            thread.join()

    def _poke(self) -> None:
        """Makes the listener update its subscriptions immediately. If Redis is unavailable, it does
        so a little later anyway."""
        with contextlib.suppress(redis.RedisError, OSError):
            self._client.publish(self._inbox, b"")

    def _listen(self) -> None:
        subscription = self._client.pubsub()
        failing = False
        needed_at = time.monotonic()
        try:
            while not self._stopped.is_set():
                if self._waits:
                    needed_at = time.monotonic()
                elif self._retires(needed_at):
                    return
                try:
                    self._follow_waits(subscription)
                    message = subscription.get_message(timeout=LISTEN_TIMEOUT_S)
                    failing = False
                except (redis.RedisError, OSError) as error:
                    if not failing:
                        _LOG.warning(
                            "the store's wake-up connection broke; waits poll for keys until it "
                            "is restored: %s",
                            error,
                        )
                    failing = True
                    self._stopped.wait(_RECONNECT_PAUSE_S)
                    continue
                if message is not None:
                    self._wake(message["channel"].decode())
        finally:
            subscription.close()

    def _retires(self, needed_at: float) -> bool:
        """Returns whether the listener should stop, because there have been no waits for
        `_LINGER_S`. The next wait starts a new listener."""
        with self._lock:
            if self._waits or time.monotonic() - needed_at < _LINGER_S:
                return False
            self._thread = None
            return True

    def _follow_waits(self, subscription: Any) -> None:
        """Subscribes to the channels that waits need, and unsubscribes from all others. When the
        server confirms a subscription, the wait is woken once."""
        with self._lock:
            wanted = {self._inbox, *self._waits}
        subscribed = {channel.decode() for channel in subscription.channels} - {
            channel.decode() for channel in subscription.pending_unsubscribe_channels
        }
        if added := wanted - subscribed:
            subscription.subscribe(*added)
        if dropped := subscribed - wanted:
            subscription.unsubscribe(*dropped)

    def _wake(self, channel: str) -> None:
        with self._lock:
            for event in self._waits.get(channel, ()):
                event.set()
