"""The job store with a real Valkey: what is written can be read, is written once, and only by the
newest coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import redis
from shoal_common.errors import CorruptDataError, InternalError, UnavailableError
from shoal_common.redis import EmbeddedRedis
from shoal_coordinator.membership.model.effects import Record
from shoal_coordinator.membership.model.spec import JobSpec
from shoal_coordinator.membership.model.state import JobState
from shoal_coordinator.state.codec import Written, encode_changes, everything
from shoal_coordinator.state.store import FencedError, JobStore

SPEC = JobSpec(job_id="j", min_workers=1, max_workers=2)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


async def written(
    store: JobStore,
    state: JobState,
    *,
    revision: int,
    commit_id: str = "c",
    records: tuple[Record, ...] = (),
) -> int:
    await store.register(state.spec.job_id)
    return await store.commit(
        state,
        encode_changes(state, everything(state)),
        records,
        revision=revision,
        commit_id=commit_id,
        durable=True,
    )


def test_repeated_commit_is_applied_once(redis_url: str) -> None:
    async def test() -> None:
        store = await JobStore.open(redis_url)
        state = JobState(spec=SPEC)
        records = (Record(kind="job_created", attributes={"why": "x"}),)
        at = await written(store, state, revision=0, records=records)
        assert abs(at - await store.now_unix_ms()) < 10_000
        await written(store, state, revision=0, records=records)
        events = await store.events("j", after="0", count=10)
        assert [event.record for event in events] == list(records)
        assert events[0].unix_ms == at
        claimed = await store.claim("j")
        assert claimed is not None
        assert (claimed.state, claimed.revision) == (state, 1)
        with pytest.raises(InternalError, match="revision"):
            await written(store, state, revision=0, commit_id="another")
        await store.close()

    run(test)


def test_newer_coordinator_fences_off_the_older_one(redis_url: str) -> None:
    async def test() -> None:
        older = await JobStore.open(redis_url)
        state = JobState(spec=SPEC)
        await written(older, state, revision=0)
        await older.check_epoch()
        newer = await JobStore.open(redis_url)
        assert newer.epoch > older.epoch
        with pytest.raises(FencedError):
            await older.check_epoch()
        # Not claimed yet: the older coordinator may still write, and the newer one will find that.
        await written(older, replace(state, number=1), revision=1, commit_id="d")
        (found,) = await newer.load_all()
        assert (found.state.number, found.revision) == (1, 2)
        with pytest.raises(FencedError, match="epoch"):
            await written(older, replace(state, number=2), revision=2, commit_id="e")
        with pytest.raises(FencedError):
            await older.claim("j")
        await written(newer, replace(state, number=2), revision=2, commit_id="e")
        await older.close()
        await newer.close()

    run(test)


def test_redis_that_lost_writes_receives_the_whole_job_again(redis_url: str) -> None:
    async def test() -> None:
        store = await JobStore.open(redis_url)
        state = JobState(spec=SPEC, number=3)
        await written(store, state, revision=0)
        with redis.Redis.from_url(redis_url) as raw:
            raw.flushall()
        after = replace(state, number=4)
        await store.commit(
            after, Written(put={}, remove=()), (), revision=1, commit_id="x", durable=True
        )
        claimed = await store.claim("j")
        assert claimed is not None
        assert (claimed.state.number, claimed.revision) == (4, 2)
        assert [stored.state.spec.job_id for stored in await store.load_all()] == ["j"]
        await store.close()

    run(test)


def test_unreadable_job_does_not_block_others(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        store = await JobStore.open(redis_url)
        for name in ("good", "bad", "worse"):
            await written(store, JobState(spec=replace(SPEC, job_id=name)), revision=0)
        with redis.Redis.from_url(redis_url) as raw:
            raw.hset("shoal:{bad}:state", "header", '{"format": 99}')
            raw.hset("shoal:{worse}:state", "member:x", '{"identity": 7}')
        assert [stored.state.spec.job_id for stored in await store.load_all()] == ["good"]
        with pytest.raises(CorruptDataError, match="format 99"):
            await store.claim("bad")
        with pytest.raises(CorruptDataError, match="member:x"):
            await store.claim("worse")
        await store.close()

    run(test)
    assert "bad" in {getattr(record, "job_id", "") for record in caplog.records}


def test_the_event_log_is_read_in_pages_and_bounded(redis_url: str) -> None:
    async def test() -> None:
        store = await JobStore.open(redis_url)
        state = JobState(spec=SPEC)
        await written(
            store, state, revision=0, records=tuple(Record(kind=f"k{i}") for i in range(25))
        )
        first = await store.events("j", after="0", count=10)
        second = await store.events("j", after=first[-1].event_id, count=100)
        assert [event.record.kind for event in first + second] == [f"k{i}" for i in range(25)]
        many = tuple(Record(kind="k") for _ in range(5000))
        for revision in range(1, 5):
            await written(store, state, revision=revision, commit_id=str(revision), records=many)
        with redis.Redis.from_url(redis_url) as raw:
            assert raw.xlen("shoal:{j}:events") < 11_000
        await store.close()

    run(test)


def test_absent_redis_is_one_clear_error(own_redis: EmbeddedRedis) -> None:
    async def test() -> None:
        store = await JobStore.open(own_redis.url)
        own_redis.close()
        with pytest.raises(UnavailableError, match="Redis is not responding") as caught:
            await store.claim("j")
        assert caught.value.reason == "STORAGE_UNAVAILABLE"
        await store.close()
        with pytest.raises(UnavailableError):
            await JobStore.open(own_redis.url)

    run(test)
