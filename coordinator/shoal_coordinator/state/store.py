"""Stores jobs in Redis: claims all jobs when a coordinator starts, then writes one transition at a
time.

Keys: `shoal:{JOB}:state` (a hash, see codec.py) and `shoal:{JOB}:events` (a stream) share a hash
tag, so that one script may write both. The set `shoal:jobs` and the counter
`shoal:coordinator:epoch` are shared by all jobs. All methods belong to one event loop and may run
concurrently.

A job without members is forgotten some time after its last change: Redis expires its keys, even if
no coordinator is running.

A commit is complete once Redis has applied it. With `durable`, it is complete once it is on Redis's
disk, if Redis can confirm that (WAITAOF: Redis 7.2 or Valkey, with an append-only file). Redis
errors become UnavailableErrors: the write may or may not have been applied, and the same commit can
be retried.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import redis
from shoal_common.errors import CorruptDataError, InternalError, UnavailableError
from shoal_common.redis import RedisSettings, connect_async

from shoal_coordinator.membership.model.effects import Record
from shoal_coordinator.membership.model.reasons import Refusal
from shoal_coordinator.membership.model.state import JobState
from shoal_coordinator.state.codec import Written, decode_state, encode_changes, everything
from shoal_coordinator.state.scripts import CLAIM, COMMIT, REWRITE

logger = logging.getLogger(__name__)

DEFAULT_RETENTION: Final = timedelta(days=1)

_JOBS: Final = "shoal:jobs"
_EPOCH: Final = "shoal:coordinator:epoch"
_LONGEST_EVENT_LOG: Final = 10_000
_CLAIMS_AT_ONCE: Final = 100
_COMMAND_TIMEOUT: Final = timedelta(seconds=5)
_DISK_TIMEOUT_MS: Final = 2_000


class FencedError(UnavailableError):
    """Raised if a newer coordinator has taken over. This coordinator must no longer write
    anything."""

    default_reason = Refusal.COORDINATOR_REPLACED


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A job's state, as read from Redis."""

    state: JobState
    revision: int


@dataclass(frozen=True, kw_only=True)
class StoredEvent:
    """An entry of a job's event log."""

    event_id: str
    record: Record

    @property
    def unix_ms(self) -> int:
        """Time at which Redis wrote the event."""
        return int(self.event_id.partition("-")[0])


class JobStore:
    """One coordinator's access to the jobs in Redis. Create it with `open`."""

    def __init__(
        self, client: Any, epoch: int, *, waits_for_disk: bool, retention: timedelta
    ) -> None:
        self.epoch = epoch
        """Number of this coordinator. Jobs refuse writes with lower numbers."""
        self._client = client
        self._waits_for_disk = waits_for_disk
        self._retention = retention

    @classmethod
    async def open(cls, url: str, *, retention: timedelta = DEFAULT_RETENTION) -> JobStore:
        """Connects to Redis and takes the next epoch. When this returns, the epoch is on Redis's
        disk.

        `retention`: time after which a job without members is forgotten.

        Raises UnavailableError, AuthenticationError, ConfigurationError.
        """
        client: Any = await connect_async(
            RedisSettings(url=url, command_timeout=_COMMAND_TIMEOUT, retries=1)
        )
        try:
            waits_for_disk = await _can_wait_for_disk(client)
            store = cls(client, 0, waits_for_disk=waits_for_disk, retention=retention)
            async with _redis_errors():
                store.epoch = int(await client.incr(_EPOCH))
            await store._wait_for_disk()
        except BaseException:
            await client.aclose()
            raise
        return store

    async def close(self) -> None:
        """Closes the connections to Redis."""
        await self._client.aclose()

    async def load_all(self) -> list[Stored]:
        """Claims and reads all jobs. Logs and skips jobs that cannot be read, and forgets jobs that
        Redis has deleted."""
        async with _redis_errors():
            names = sorted(name.decode() for name in await self._client.smembers(_JOBS))
        found: list[Stored] = []
        for start in range(0, len(names), _CLAIMS_AT_ONCE):
            async with _redis_errors(), self._client.pipeline(transaction=False) as pipeline:
                for name in names[start : start + _CLAIMS_AT_ONCE]:
                    pipeline.eval(CLAIM, 1, _state_key(name), str(self.epoch))
                answers = await pipeline.execute()
            for name, answer in zip(names[start : start + _CLAIMS_AT_ONCE], answers, strict=True):
                try:
                    stored = self._claimed(answer)
                except CorruptDataError:
                    # The other jobs are not affected; a request for this one fails with an error.
                    logger.exception(
                        "could not read a job and left it unchanged", extra={"job_id": name}
                    )
                    continue
                if stored is None:
                    await self.forget(name)
                else:
                    found.append(stored)
        return found

    async def claim(self, job_id: str) -> Stored | None:
        """Claims and reads one job; returns None if the job does not exist. Raises FencedError if
        it belongs to a newer coordinator, and CorruptDataError."""
        async with _redis_errors():
            answer = await self._client.eval(CLAIM, 1, _state_key(job_id), str(self.epoch))
        return self._claimed(answer)

    async def register(self, job_id: str) -> None:
        """Adds a job that is about to be created to the set of jobs that `load_all` reads."""
        async with _redis_errors():
            await self._client.sadd(_JOBS, job_id)

    async def dropped(self, job_ids: Sequence[str]) -> list[str]:
        """Returns the ids in `job_ids` whose jobs are no longer in Redis."""
        async with _redis_errors(), self._client.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.exists(_state_key(job_id))
            answers = await pipeline.execute()
        return [job_id for job_id, there in zip(job_ids, answers, strict=True) if not there]

    async def forget(self, job_id: str) -> None:
        """Removes a job from the set of jobs that `load_all` reads. Called when Redis has deleted
        the job's data."""
        async with _redis_errors():
            await self._client.srem(_JOBS, job_id)

    async def commit(
        self,
        state: JobState,
        written: Written,
        records: Sequence[Record],
        *,
        revision: int,
        commit_id: str,
        durable: bool,
    ) -> int:
        """Writes one transition that is based on `revision`. Returns Redis's time in Unix
        milliseconds.

        The call may be retried with the same `commit_id`; the transition is applied only once.
        `state`: the job after the transition. It is written in full if Redis has lost the revision
        that the transition is based on. Raises FencedError, UnavailableError.
        """
        retention = self._retention if state.is_deserted else timedelta(0)
        arguments = _commit_arguments(self.epoch, revision, commit_id, written, records, retention)
        job_id = state.spec.job_id
        answer = await self._send_commit(job_id, arguments, durable=durable)
        if answer[0] == b"BEHIND":
            logger.error(
                "Redis lost writes of a job; rewriting it from memory",
                extra={"job_id": job_id, "revision": revision},
            )
            await self._rewrite(state, revision)
            answer = await self._send_commit(job_id, arguments, durable=durable)
        if answer[0] == b"FENCED":
            raise self._fenced(job_id, answer[1])
        if answer[0] != b"OK":
            raise InternalError(
                f"job {job_id} is at revision {answer[1]!r} in Redis, but at {revision} in this "
                "coordinator, in the same epoch"
            )
        return int(answer[1]) * 1000 + int(answer[2]) // 1000

    async def now_unix_ms(self) -> int:
        """Returns Redis's time in Unix milliseconds."""
        async with _redis_errors():
            seconds, microseconds = await self._client.time()
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def check_epoch(self) -> None:
        """Raises FencedError if a newer coordinator has started with the same Redis server."""
        async with _redis_errors():
            newest = int(await self._client.get(_EPOCH) or 0)
        if newest > self.epoch:
            raise FencedError(
                f"another coordinator (epoch {newest}) has replaced this one (epoch {self.epoch})"
            )

    async def events(self, job_id: str, *, after: str, count: int) -> list[StoredEvent]:
        """Returns up to `count` events, oldest first. `after`: id of the event that precedes the
        first result; "0": start with the oldest event that Redis still has."""
        async with _redis_errors():
            entries = await self._client.xrange(_events_key(job_id), min=f"({after}", count=count)
        return [_parse_event(event_id, fields) for event_id, fields in entries]

    async def newest_events(self, job_id: str, *, count: int) -> list[StoredEvent]:
        """Returns up to `count` of the newest events, oldest first."""
        async with _redis_errors():
            entries = await self._client.xrevrange(_events_key(job_id), count=count)
        return [_parse_event(event_id, fields) for event_id, fields in reversed(entries)]

    async def _send_commit(
        self, job_id: str, arguments: Sequence[str], *, durable: bool
    ) -> list[Any]:
        keys = (_state_key(job_id), _events_key(job_id))
        async with _redis_errors(), self._client.pipeline(transaction=False) as pipeline:
            pipeline.eval(COMMIT, 2, *keys, *arguments)
            if durable and self._waits_for_disk:
                pipeline.execute_command("WAITAOF", 1, 0, _DISK_TIMEOUT_MS)
            answers = await pipeline.execute()
        if durable and self._waits_for_disk:
            _check_on_disk(answers[1])
        answer: list[Any] = answers[0]
        return answer

    async def _rewrite(self, state: JobState, revision: int) -> None:
        """Writes the complete job. `state` already contains the changes of the current transition,
        so committing them afterwards has no effect."""
        written = encode_changes(state, everything(state)).put
        await self.register(state.spec.job_id)
        pairs = [part for pair in written.items() for part in pair]
        async with _redis_errors():
            answer = await self._client.eval(
                REWRITE, 1, _state_key(state.spec.job_id), str(self.epoch), str(revision), *pairs
            )
        if answer[0] == b"FENCED":
            raise self._fenced(state.spec.job_id, answer[1])

    async def _wait_for_disk(self) -> None:
        if self._waits_for_disk:
            async with _redis_errors():
                _check_on_disk(
                    await self._client.execute_command("WAITAOF", 1, 0, _DISK_TIMEOUT_MS)
                )

    def _claimed(self, answer: list[Any]) -> Stored | None:
        if answer[0] == b"ABSENT":
            return None
        if answer[0] == b"FENCED":
            raise self._fenced("", answer[1])
        flat = [part.decode() for part in answer[1]]
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        try:
            revision = int(fields["revision"])
        except (KeyError, ValueError) as error:
            raise CorruptDataError(
                f"a job in Redis has no valid revision ({error}), so another program has changed it"
            ) from error
        return Stored(state=decode_state(fields), revision=revision)

    def _fenced(self, job_id: str, epoch: bytes) -> FencedError:
        what = f"job {job_id}" if job_id else "a job"
        return FencedError(
            f"{what} was taken over by another coordinator (epoch {epoch.decode()}), which "
            f"started after this one (epoch {self.epoch})"
        )


def _commit_arguments(
    epoch: int,
    revision: int,
    commit_id: str,
    written: Written,
    records: Sequence[Record],
    retention: timedelta,
) -> list[str]:
    numbers = (
        len(written.put),
        len(written.remove),
        len(records),
        round(retention.total_seconds() * 1000),
    )
    arguments = [str(epoch), str(revision), commit_id, str(_LONGEST_EVENT_LOG), *map(str, numbers)]
    for pair in written.put.items():
        arguments.extend(pair)
    arguments.extend(written.remove)
    for record in records:
        arguments.extend(
            (
                record.kind,
                str(record.generation),
                record.member_id,
                json.dumps(dict(record.attributes)),
                str(record.run),
            )
        )
    return arguments


def _parse_event(event_id: bytes, fields: Mapping[bytes, bytes]) -> StoredEvent:
    return StoredEvent(
        event_id=event_id.decode(),
        record=Record(
            kind=fields[b"kind"].decode(),
            generation=int(fields[b"generation"]),
            member_id=fields[b"member_id"].decode(),
            attributes=json.loads(fields[b"attributes"]),
            run=int(fields.get(b"run", b"1")),  # in older releases a job had a single run
        ),
    )


async def _can_wait_for_disk(client: Any) -> bool:
    try:
        await client.execute_command("WAITAOF", 1, 0, _DISK_TIMEOUT_MS)
    except redis.ResponseError as error:
        logger.warning(
            "this Redis server cannot confirm that a write is on disk (%s), so the newest "
            "generations may be lost if it crashes; use Valkey or Redis 7.2 with appendonly yes",
            error,
        )
        return False
    except redis.RedisError as error:
        raise _unavailable(error) from error
    return True


def _check_on_disk(answer: Sequence[int]) -> None:
    if int(answer[0]) < 1:
        raise UnavailableError(
            f"Redis took longer than {_DISK_TIMEOUT_MS} ms to write to disk",
            reason=Refusal.STORAGE_UNAVAILABLE,
        )


@asynccontextmanager
async def _redis_errors() -> AsyncIterator[None]:
    try:
        yield
    except (redis.RedisError, OSError) as error:
        raise _unavailable(error) from error


def _unavailable(error: Exception) -> UnavailableError:
    return UnavailableError(
        f"Redis is not responding: {error or type(error).__name__}",
        reason=Refusal.STORAGE_UNAVAILABLE,
    )


def _state_key(job_id: str) -> str:
    return f"shoal:{{{job_id}}}:state"


def _events_key(job_id: str) -> str:
    return f"shoal:{{{job_id}}}:events"
