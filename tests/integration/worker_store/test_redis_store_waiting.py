"""Waits wake by notification, end at their deadline or on an abort, and survive an absent
server."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
from shoal.launcher.processes.ports import ReservedPort
from shoal_common.errors import MembershipChanged
from shoal_common.redis import EmbeddedRedis
from shoal_worker.store import redis_store
from shoal_worker.store.errors import StoreAbortedError, StoreTimeoutError, StoreUnavailableError
from shoal_worker.store.redis_store import RedisStore

T = TypeVar("T")
_DEADLINE_S = 60.0


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def _eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        threading.Event().wait(0.005)


def _blocked_on(store: RedisStore, key: str, waits: int = 1) -> Callable[[], bool]:
    """Returns whether the given number of waits sleep on the key: the server then has their
    subscriptions."""

    def there() -> bool:
        client = store._connection.client
        return (
            client.pubsub_numsub(f"{store.prefix}:wake:{key}")[0][1] >= 1
            and len(_waits(store, key)) >= waits
        )

    return there


def _waits(store: RedisStore, key: str) -> set[threading.Event]:
    return store._connection.wakeups._waits.get(f"{store.prefix}:wake:{key}", set())


def _result(future: Future[T]) -> T:
    return future.result(timeout=_DEADLINE_S)


def test_a_blocked_get_returns_when_another_store_sets_the_key(
    store: RedisStore, redis_url: str, threads: ThreadPoolExecutor
) -> None:
    writer = RedisStore(redis_url, store.prefix)
    waiting = threads.submit(store.get, "late")
    _eventually(_blocked_on(store, "late"))
    writer.set("late", "here")
    assert _result(waiting) == b"here"
    writer.close()


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.set("key", "1"),
        lambda store: store.add("key", 1),
        lambda store: store.append("key", "1"),
        lambda store: store.compare_set("key", "", "1"),
        lambda store: store.multi_set(["other", "key"], ["0", "1"]),
    ],
    ids=["set", "add", "append", "compare_set", "multi_set"],
)
def test_every_kind_of_write_wakes_a_wait(
    store: RedisStore, threads: ThreadPoolExecutor, write: Callable[[RedisStore], object]
) -> None:
    waiting = threads.submit(store.get, "key")
    _eventually(_blocked_on(store, "key"))
    write(store)
    assert _result(waiting) == b"1"


def test_wake_up_needs_no_second_poll(
    store: RedisStore, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes a key back and forth twenty times; a missed notification would last until the store's
    deadline."""
    monkeypatch.setattr(redis_store, "_RECHECK_S", 1000.0)

    def answer() -> None:
        for turn in range(20):
            store.get(f"ball {turn}")
            store.set(f"back {turn}", "x")

    answering = threads.submit(answer)
    for turn in range(20):
        store.set(f"ball {turn}", "x")
        store.get(f"back {turn}")
    _result(answering)


def test_many_waits_on_one_key_all_wake(store: RedisStore, threads: ThreadPoolExecutor) -> None:
    waiting = [threads.submit(store.get, "key") for _ in range(4)]
    _eventually(_blocked_on(store, "key", waits=4))
    store.set("key", "1")
    assert [_result(one) for one in waiting] == [b"1"] * 4


def test_a_wait_for_several_keys_ends_with_the_last(
    store: RedisStore, threads: ThreadPoolExecutor
) -> None:
    store.set("b", "2")
    waiting = threads.submit(store.multi_get, ["a", "b", "c"])
    _eventually(_blocked_on(store, "a"))
    store.set("a", "1")
    _eventually(_blocked_on(store, "c"))
    store.set("c", "3")
    assert _result(waiting) == [b"1", b"2", b"3"]


def test_blocked_queue_pop_returns_the_pushed_value(
    store: RedisStore, threads: ThreadPoolExecutor
) -> None:
    waiting = threads.submit(store.queue_pop, "q")
    _eventually(_blocked_on(store, "q"))
    store.queue_push("q", "item")
    assert _result(waiting) == b"item"


def test_barrier_holds_until_all_have_arrived(
    store: RedisStore, redis_url: str, threads: ThreadPoolExecutor
) -> None:
    other = RedisStore(redis_url, store.prefix)
    first = threads.submit(store.barrier, "b", 2, timedelta(seconds=60))
    _eventually(_blocked_on(store, "b/last_member"))
    assert not first.done()
    other.barrier("b", 2)
    _result(first)
    other.close()


def test_deadline_names_the_missing_keys(store: RedisStore) -> None:
    store.set("here", "1")
    with pytest.raises(StoreTimeoutError, match=r"waited 0\.05 s for 'gone', 'lost'"):
        store.wait(["here", "gone", "lost"], timedelta(milliseconds=50))


def test_stores_own_timeout_applies_to_get(store: RedisStore) -> None:
    store.set_timeout(timedelta(milliseconds=20))
    assert store.timeout == timedelta(milliseconds=20)
    with pytest.raises(StoreTimeoutError, match="'gone'"):
        store.get("gone")


def test_an_abort_frees_every_blocked_wait_and_forbids_later_ones(
    store: RedisStore, threads: ThreadPoolExecutor
) -> None:
    waiting = [
        threads.submit(store.get, "never"),
        threads.submit(store.queue_pop, "never"),
        threads.submit(store.wait, ["never"]),
    ]
    _eventually(_blocked_on(store, "never", waits=3))
    store.abort("generation 4 supersedes this one")
    for one in waiting:
        with pytest.raises(StoreAbortedError, match="generation 4"):
            _result(one)
    with pytest.raises(MembershipChanged):
        store.get("never")
    with pytest.raises(MembershipChanged):
        store.set("a", "1")


def test_abort_leaves_stores_with_other_prefixes_alone(
    store: RedisStore, threads: ThreadPoolExecutor
) -> None:
    following = store.with_prefix(store.prefix + ":next")
    waiting = threads.submit(following.get, "key")
    _eventually(_blocked_on(following, "key"))
    store.abort("over")
    following.set("key", "1")
    assert _result(waiting) == b"1"


def test_abort_callback_is_called_once_even_if_registered_late(store: RedisStore) -> None:
    called: list[str] = []
    with store.on_abort(called.append):
        store.abort("first")
        store.abort("second")
    assert called == ["first"]
    with store.on_abort(called.append):
        assert called == ["first", "first"]


def test_wait_survives_a_server_restart_even_if_it_begins_during_the_outage(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    reserved = ReservedPort()
    server = EmbeddedRedis(tmp_path, port=reserved.port)
    opened = RedisStore(server.url, "p", timeout=timedelta(seconds=60))
    try:
        waiting = threads.submit(opened.get, "key")
        _eventually(_blocked_on(opened, "key"))
        server.close()
        begun_away = threads.submit(opened.get, "other")
        _eventually(lambda: bool(_waits(opened, "other")))
        server = EmbeddedRedis(tmp_path, port=reserved.port)
        opened.multi_set(["key", "other"], ["1", "2"])
        assert (_result(waiting), _result(begun_away)) == (b"1", b"2")
    finally:
        opened.close()
        server.close()
        reserved.close()


def test_absent_server_is_named_when_the_call_cannot_wait(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        opened = RedisStore(server.url, "p")
    with pytest.raises(StoreUnavailableError, match="Redis did not respond"):
        opened.set("key", "1")
    opened.close()


def test_closing_a_store_ends_its_thread(redis_url: str, threads: ThreadPoolExecutor) -> None:
    before = _listeners()
    opened = RedisStore(redis_url, "p")
    waiting = threads.submit(opened.get, "never")
    _eventually(_blocked_on(opened, "never"))
    opened.close()
    opened.close()
    with pytest.raises(StoreAbortedError, match="is closed"):
        _result(waiting)
    assert _listeners() <= before


def test_forgotten_store_ends_its_thread(redis_url: str) -> None:
    before = _listeners()
    opened = RedisStore(redis_url, "p", timeout=timedelta(milliseconds=10))
    with pytest.raises(StoreTimeoutError):
        opened.get("never")
    assert len(_listeners() - before) == 1
    del opened
    gc.collect()
    _eventually(lambda: _listeners() <= before)


def test_forgotten_store_closes_its_idle_connections(redis_url: str) -> None:
    opened = RedisStore(redis_url, "p")
    opened.set("a", "1")
    client = opened._connection.client  # alive, as in a cycle that is not yet collected
    connection = client.connection_pool.get_connection()
    assert connection.is_connected
    client.connection_pool.release(connection)
    del opened
    gc.collect()
    assert not connection.is_connected


def test_stores_that_share_connections_close_them_with_the_last(redis_url: str) -> None:
    first = RedisStore(redis_url, "p")
    second = first.with_prefix("q")
    first.close()
    second.set("a", "1")
    assert second.get("a") == b"1"
    second.close()


def _listeners() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "shoal-store-wakeups"}
