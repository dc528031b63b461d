"""RedisStore answers any sequence of calls in the same way as torch's own stores."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from shoal_common.errors import ConfigurationError
from shoal_worker.store.errors import StoreTimeoutError, StoreValueError
from shoal_worker.store.redis_store import RedisStore

_MOMENT = timedelta(milliseconds=1)
_KEYS = st.sampled_from(["a", "b", "ключ", "with space/and:colon"])
_NUMBERS = st.sampled_from(["n", "m"])
_QUEUES = st.sampled_from(["q", "r"])
_TEXTS = st.one_of(st.text(max_size=5), st.sampled_from(["x", "y"]))


def _outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "returned", call()
    except dist.QueueEmptyError:
        return "raised", "empty queue"
    except dist.DistStoreError:
        return "raised", "timeout"


class _SideBySide(RuleBasedStateMachine):
    """Makes the same calls on a RedisStore and on torch's HashStore."""

    def __init__(self, opened: RedisStore) -> None:
        super().__init__()
        self.ours = opened.with_prefix(f"shoal:{{test}}:{uuid.uuid4().hex}")
        self.ours.set_timeout(_MOMENT)
        self.theirs = dist.HashStore()
        self.theirs.set_timeout(_MOMENT)

    def _same(self, call: Callable[[Any], Any]) -> None:
        assert _outcome(lambda: call(self.ours)) == _outcome(lambda: call(self.theirs))

    @rule(key=_KEYS, value=_TEXTS)
    def set(self, key: str, value: str) -> None:
        self._same(lambda store: store.set(key, value))

    @rule(key=st.one_of(_KEYS, _NUMBERS))
    def get(self, key: str) -> None:
        self._same(lambda store: store.get(key))

    @rule(key=_NUMBERS, amount=st.integers(min_value=-(2**40), max_value=2**40))
    def add(self, key: str, amount: int) -> None:
        self._same(lambda store: store.add(key, amount))

    @rule(key=_KEYS, value=_TEXTS)
    def append(self, key: str, value: str) -> None:
        self._same(lambda store: store.append(key, value))

    @rule(key=_KEYS, expected=_TEXTS, desired=_TEXTS)
    def compare_set(self, key: str, expected: str, desired: str) -> None:
        self._same(lambda store: store.compare_set(key, expected, desired))

    @rule(key=st.one_of(_KEYS, _NUMBERS))
    def delete_key(self, key: str) -> None:
        self._same(lambda store: store.delete_key(key))

    @rule(keys=st.lists(_KEYS, max_size=4))
    def check(self, keys: list[str]) -> None:
        self._same(lambda store: store.check(keys))

    @rule(keys=st.lists(_KEYS, max_size=4))
    def wait(self, keys: list[str]) -> None:
        self._same(lambda store: store.wait(keys, _MOMENT))

    @rule(pairs=st.dictionaries(_KEYS, _TEXTS))
    def multi_set(self, pairs: dict[str, str]) -> None:
        self._same(lambda store: store.multi_set(list(pairs), list(pairs.values())))

    @rule(keys=st.lists(_KEYS, max_size=4))
    def multi_get(self, keys: list[str]) -> None:
        self._same(lambda store: store.multi_get(keys))

    @rule()
    def keys(self) -> None:
        self._same(lambda store: store.num_keys())
        self._same(lambda store: sorted(store.list_keys()))

    @rule(queue=_QUEUES, value=_TEXTS)
    def queue_push(self, queue: str, value: str) -> None:
        self._same(lambda store: store.queue_push(queue, value))

    @rule(queue=_QUEUES, block=st.booleans())
    def queue_pop(self, queue: str, block: bool) -> None:
        self._same(lambda store: store.queue_pop(queue, block))

    @rule(queue=_QUEUES)
    def queue_len(self, queue: str) -> None:
        self._same(lambda store: store.queue_len(queue))

    def teardown(self) -> None:
        self.ours.discard()


def test_any_sequence_of_calls_matches_torchs_hash_store(store: RedisStore) -> None:
    limits = settings(max_examples=40, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(lambda: _SideBySide(store), settings=limits)


def test_binary_values_of_any_size_are_returned_unchanged(store: RedisStore) -> None:
    every_byte = bytes(range(256))
    store.set("small", every_byte)
    store.set("large", every_byte * 4096)
    store.set("none", b"")
    assert store.multi_get(["none", "small", "large"]) == [b"", every_byte, every_byte * 4096]


def test_torchs_prefix_store_and_its_cpp_callers_reach_every_method(store: RedisStore) -> None:
    through = dist.PrefixStore("p", store)
    through.set("a", "1")
    assert through.get("a") == b"1"
    assert store.get("p/a") == b"1"
    assert through.add("n", 3) == 3
    assert through.check(["a", "n"])
    assert through.compare_set("a", "1", "2") == b"2"
    through.append("a", "3")
    through.multi_set(["x", "y"], ["4", "5"])
    assert through.multi_get(["a", "x", "y"]) == [b"23", b"4", b"5"]
    assert through.delete_key("x")
    assert through.num_keys() == 3
    assert through.has_extended_api()
    through.wait(["a"])
    through.wait(["a"], timedelta(seconds=1))
    assert through.clone().get("y") == b"5"
    through.barrier("together", 1)


def test_error_in_a_call_from_cpp_surfaces_as_the_original_python_error(
    store: RedisStore,
) -> None:
    with pytest.raises(StoreTimeoutError, match="'p/absent'"):
        dist.PrefixStore("p", store).wait(["absent"], timedelta(milliseconds=10))


def test_add_to_a_non_numeric_value_names_the_key(store: RedisStore) -> None:
    store.set("word", "seven")
    with pytest.raises(StoreValueError, match="key 'word'"):
        store.add("word", 1)


def test_multi_set_requires_as_many_values_as_keys(store: RedisStore) -> None:
    with pytest.raises(StoreValueError, match="2 keys and 1 values"):
        store.multi_set(["a", "b"], ["1"])
    assert store.num_keys() == 0


def test_stores_with_different_prefixes_are_isolated(store: RedisStore) -> None:
    other = store.with_prefix(store.prefix + ":other")
    store.set("a", "1")
    assert not other.check(["a"])
    assert other.num_keys() == 0


def test_keys_left_in_redis_expire(store: RedisStore, redis_url: str) -> None:
    import redis

    store.set("a", "1")
    store.add("n", 1)
    store.queue_push("q", "1")
    with redis.Redis.from_url(redis_url) as client:
        left = [key for key in client.scan_iter() if key.startswith(store.prefix.encode())]
        assert len(left) == 2
        assert all(0 < client.ttl(key) <= 24 * 3600 for key in left)


def test_discarding_a_store_leaves_no_key(store: RedisStore) -> None:
    store.set("a", "1")
    store.discard()
    assert store.num_keys() == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prefix": ""}, "prefix=''"),
        ({"timeout": timedelta(0)}, "timeout=0:00:00"),
        ({"lifetime": timedelta(seconds=5)}, "lifetime=0:00:05"),
        ({"url": "http://127.0.0.1"}, "expected redis://"),
    ],
)
def test_invalid_settings_are_refused(redis_url: str, arguments: dict[str, Any], said: str) -> None:
    given = {"url": redis_url, "prefix": "p", **arguments}
    with pytest.raises(ConfigurationError, match=said):
        RedisStore(given.pop("url"), given.pop("prefix"), **given)
