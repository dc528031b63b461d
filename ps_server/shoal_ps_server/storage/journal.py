"""Appends records to the journal: in the order given, many to one sync, and each one's effect after
it is on disk, in that same order.

Threads: the event loop calls `append` and `rotate`, and runs effects; one thread writes. They share
the queue alone.

When the disk does not take a batch, it and all that was appended meanwhile have no effect, and
whoever waits for them is told. The next append tries anew, in a new file, which says that nothing
of that batch counts.

Another server may have to have each record as well (`hold`): then its effect comes once that one
has said so.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Generic, Protocol, TypeVar

from shoal_common.errors import UnavailableError
from shoal_common.failpoints import failpoint

from shoal_ps_server.settings import Fsync
from shoal_ps_server.storage.record import OVERHEAD_BYTES, Record
from shoal_ps_server.storage.segments import Segments, write_all

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_IN_A_BATCH_BYTES: Final = 64 << 20
"""So much is written before those who wait for the first of it are answered."""
_RETRY_AFTER: Final = timedelta(seconds=2)
"""Sooner than that a disk that is full will hardly have room, and pushes are megabytes."""
_LOG_EVERY_S: Final = 10.0
_MOST_AT_ONCE_S: Final = 0.005
"""So long effects follow one another before the loop's other work has its turn."""


class Follower(Protocol):
    """What hears of every record, in order. Called on the loop."""

    def made(self, record: Record) -> None:
        """It is on disk, and has had its effect. While the journal does not hold."""

    def written(self, record: Record) -> int:
        """It is on disk, and has its effect once this position was confirmed. While the journal
        holds."""


@dataclass(kw_only=True)
class _Entry(Generic[T]):
    record: Record | None
    """None: nothing is written."""
    effect: Callable[[], T]
    refused: Callable[[], None]
    done: asyncio.Future[T]
    rotates: bool = False
    """The next file begins here."""
    number: int = 0
    """That file's. Written before the loop is told."""
    over: bool = False
    """It has had its effect, or was refused. The loop's."""
    position: int = 0
    """While the journal holds: what must be confirmed before its effect. The loop's."""


class _Control(enum.Enum):
    RESUME = "resume"
    """The loop knows of the failure: what is in the queue behind this was appended with that
    knowledge."""
    CLOSE = "close"


@dataclass(kw_only=True)
class _Batch:
    entries: list[_Entry[Any]] = field(default_factory=list)
    nbytes: int = 0


class Journal:
    """One server's. Made on the event loop; `close` it."""

    def __init__(
        self,
        segments: Segments,
        *,
        number: int,
        previous_end: int,
        fsync: Fsync,
        failed: Callable[[BaseException], None],
        written: Callable[[int, int, float], None] = lambda records, nbytes, seconds: None,
        unwritten: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins file `number`; of the one before it, `previous_end` bytes count. `failed` is told
        of an effect that raised: memory lacks what the disk has, so the server must end and
        recover. `written`: of each batch, its records, bytes and seconds; `unwritten`: of a batch
        that the disk did not take. Raises OSError."""
        self._segments = segments
        self._fsync = fsync
        self._failed = failed
        self._written = written
        self._unwritten = unwritten
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Entry[Any] | _Control] = queue.SimpleQueue()
        self._number = number
        self._descriptor, self._end = segments.create(number, previous_end=previous_end)
        self._journal_id = segments.journal_id
        self._durable = self._end
        """So much of the file is on disk for certain; and so much of it counts."""
        self._pending: deque[_Entry[Any]] = deque()
        """What was appended and is not known to be written. The loop's."""
        self._ready: deque[_Entry[Any]] = deque()
        """What is written and has had no effect yet. The loop's."""
        self._refusal: Exception | None = None
        """Why what is in `_pending` cannot be written; it is refused once `_ready` is empty. The
        loop's, as what follows."""
        self._making_soon = False
        """`_make_some` is to be called."""
        self._follower: Follower | None = None
        self._holding = False
        self._position = 0
        """Position of the last record that the follower was given while the journal holds; and
        `_confirmed`: up to where it has them."""
        self._confirmed = 0
        self.write_error: Exception | None = None
        """Why the last write failed; None: it did not. Assigned on the loop, read by any thread."""
        self._unmade: Exception | None = None
        """Why the effect of a record failed, or nothing is written any more: those after it have
        none. The loop's."""
        self._broken = False
        """The file may have a part of a batch at its end. This and what stands above but for the
        queue: the thread's."""
        self._unwritten_batches = 0
        """Refused since the last one that was written; `_logged_at`: when the log last said so. The
        thread's."""
        self._logged_at = -math.inf
        self._held: _Entry[Any] | None = None
        """Taken out of the queue, for a batch of its own."""
        self.bytes_since_rotation = segments.nbytes()
        """Written since the last `rotate`, or what a recovery would have to read. The loop's."""
        self._thread = threading.Thread(target=self._write, name="shoal-ps-journal", daemon=True)
        self._thread.start()

    def append(
        self,
        record: Record | None,
        effect: Callable[[], T],
        *,
        refused: Callable[[], None] = lambda: None,
    ) -> asyncio.Future[T]:
        """Writes the record, then calls `effect` on the loop; the future has its result, or
        UnavailableError / JOURNAL_FAILED.

        Without a record: after all that was appended before. Where the record could not be written,
        `refused` is called in the effect's place.
        """
        return self._put(
            _Entry(record=record, effect=effect, refused=refused, done=self._loop.create_future())
        )

    def rotate(self, effect: Callable[[int], T]) -> asyncio.Future[T]:
        """Begins the next file, and calls `effect` with its number, between what is in the files
        before and what is in that one. Fails as `append`."""
        done: asyncio.Future[T] = self._loop.create_future()
        entry = _Entry(
            record=None,
            effect=lambda: effect(entry.number),
            refused=lambda: None,
            done=done,
            rotates=True,
        )
        return self._put(entry)

    def follow(self, follower: Follower) -> None:
        """From now on `follower` hears of what has had its effect; one that heard before does not.
        An effect may call it."""
        assert not self._holding, "the one before has been let go"
        self._follower = follower

    def hold(self, *, position: int, confirmed: int) -> None:
        """From now on the follower is given each record before its effect, which waits for
        `confirm`. So far it was given records up to `position`, and has those up to `confirmed`. An
        effect may call it."""
        assert self._follower is not None, "somebody follows"
        self._holding, self._position, self._confirmed = True, position, confirmed
        for entry in self._ready:
            self._give(entry)

    def confirm(self, position: int) -> None:
        """The follower has all up to this position."""
        self._confirmed = max(self._confirmed, position)
        self._make_soon()

    def follow_no_more(self) -> None:
        """Effects wait for nobody, as before `follow`."""
        self._follower, self._holding = None, False
        self._make_soon()

    @property
    def holds(self) -> bool:
        """Effects wait for a follower."""
        return self._holding

    @property
    def is_broken(self) -> bool:
        """A record has had no effect: memory lacks what the disk has."""
        return self._unmade is not None

    @property
    def end(self) -> tuple[int, int]:
        """Number of the last file, and how many bytes of it count. After `close`."""
        return self._number, self._end

    def give_up(self, reason: UnavailableError) -> None:
        """No record has an effect any more; whoever waits for one is told why."""
        if self._unmade is None:
            self._unmade = reason
        self._follower, self._holding = None, False
        self._make_soon()

    async def close(self) -> None:
        """Waits for what was appended, but not for a follower. Nothing is to be appended after
        that."""
        self._queue.put(_Control.CLOSE)
        # it has told the loop of all before this returns
        await asyncio.to_thread(self._thread.join)
        if self._holding and self._ready:
            self.give_up(
                UnavailableError(
                    "this server ends, and its backup has not confirmed the change; try again",
                    reason="SERVER_STOPPING",
                )
            )
        while self._ready:
            await asyncio.sleep(0)

    def _put(self, entry: _Entry[T]) -> asyncio.Future[T]:
        if self._unmade is not None:
            _fail(entry.done, _ending(self._unmade))
            return entry.done
        self._pending.append(entry)
        self._queue.put(entry)
        return entry.done

    # ---------------------------------------------------------------------------------- on the loop

    def _finish(self, batch: _Batch, error: Exception | None, seconds: float) -> None:
        """The thread is done with a batch."""
        if all(entry.over for entry in batch.entries):
            return  # refused with a batch before it
        if error is not None:
            # What was written before is to have its effect first: what is admitted later is
            # compared with that.
            self._refusal = self._refusal or error
            self.write_error = error
        else:
            self.write_error = None
            self.bytes_since_rotation += batch.nbytes
            self._written(
                sum(each.record is not None for each in batch.entries), batch.nbytes, seconds
            )
            for entry in batch.entries:
                first = self._pending.popleft()
                assert first is entry, "the journal keeps the order"
                self._ready.append(entry)
                if self._holding:
                    self._give(entry)
        if not self._making_soon:
            self._make_some()

    def _give(self, entry: _Entry[Any]) -> None:
        if entry.record is not None and self._follower is not None:
            self._position = self._follower.written(entry.record)
        entry.position = self._position

    def _make_soon(self) -> None:
        if not self._making_soon:
            self._making_soon = True
            self._loop.call_soon(self._make_some)

    def _make_some(self) -> None:
        self._making_soon = False
        started = time.perf_counter()
        while self._ready and not (self._holding and self._ready[0].position > self._confirmed):
            entry = self._ready.popleft()
            self._make(entry)
            if self._ready and time.perf_counter() - started > _MOST_AT_ONCE_S:
                self._make_soon()
                return
        if self._refusal is not None and not self._ready:
            self._refuse(self._refusal)

    def _make(self, entry: _Entry[Any]) -> None:
        if entry.over:
            return
        entry.over = True
        if entry.rotates:
            self.bytes_since_rotation = 0
        if self._unmade is not None:
            _fail(entry.done, _ending(self._unmade))
            return
        try:
            result = entry.effect()
        except Exception as reason:
            self._unmade = reason
            _fail(entry.done, _ending(reason))
            self._failed(reason)
            return
        failpoint("journal.effect_made")
        if not entry.done.done():  # whoever waited may have gone
            entry.done.set_result(result)
        if entry.record is not None and self._follower is not None and not self._holding:
            self._follower.made(entry.record)

    def _refuse(self, error: Exception) -> None:
        """All that is on its way, at once: what is admitted from here on must not count on any of
        it."""
        self._refusal = None
        refused, self._pending = self._pending, deque()
        for entry in refused:
            entry.over = True
            entry.refused()
            _fail(entry.done, _refusal(error))
        self._queue.put(_Control.RESUME)
        self._unwritten()

    # -------------------------------------------------------------------------------- on the thread

    def _write(self) -> None:
        failure: Exception | None = None
        while True:
            batch, control = self._next()
            if batch.entries:
                started = time.perf_counter()
                if failure is None:
                    failure = self._write_batch(batch)
                self._tell(batch, failure, time.perf_counter() - started)
            if control is _Control.RESUME:
                failure = None
            elif control is _Control.CLOSE:
                break
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def _next(self) -> tuple[_Batch, _Control | None]:
        """What is there, once there is something: entries that go together, and the control that
        came behind them, if one did."""
        batch = _Batch()
        held, self._held = self._held, None
        item = held or self._queue.get()
        while True:
            if isinstance(item, _Control):
                return batch, item
            if item.rotates and batch.entries:
                self._held = item
                return batch, None
            batch.entries.append(item)
            if item.record is not None:
                batch.nbytes += item.record.payload.nbytes
            if item.rotates or self._fsync is Fsync.ALWAYS or batch.nbytes >= MOST_IN_A_BATCH_BYTES:
                return batch, None
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, None

    def _write_batch(self, batch: _Batch) -> Exception | None:
        """Returns why it could not be written: whatever that is, the journal goes on with the next
        one."""
        try:
            if self._broken:
                self._begin(self._number + 1)
            if batch.entries[-1].rotates:
                self._begin(self._number + 1)
                batch.entries[-1].number = self._number
                return None
            parts: list[bytes | memoryview] = []
            position = self._end
            for entry in batch.entries:
                if entry.record is not None:
                    encoded = entry.record.encoded(
                        self._journal_id, file=self._number, at=position, durable=self._durable
                    )
                    position += sum(map(len, encoded))
                    parts.extend(encoded)
            batch.nbytes = position - self._end
            if parts:
                self._broken = True
                failpoint("journal.before_write")
                write_all(self._descriptor, parts, at=self._end)
                if self._fsync is not Fsync.NEVER:
                    os.fdatasync(self._descriptor)
                    self._durable = position
                self._end = position
                self._broken = False
                failpoint("journal.durable")
        except Exception as error:
            self._log_failure(error)
            self._disown()
            return error
        if self._unwritten_batches:
            logger.info(
                "the journal can be written again",
                extra={"batches_refused": self._unwritten_batches},
            )
            self._unwritten_batches, self._logged_at = 0, -math.inf
        return None

    def _log_failure(self, error: Exception) -> None:
        """At once, and then every ten seconds: clients repeat refused updates without end."""
        self._unwritten_batches += 1
        now = time.monotonic()
        if now >= self._logged_at + _LOG_EVERY_S:
            self._logged_at = now
            logger.error(
                "the journal could not be written; updates are refused until it can be",
                extra={"error": error, "batches_refused": self._unwritten_batches},
            )

    def _disown(self) -> None:
        """What a failed write left in the file, and whether a failed sync left anything, is not
        known: it must not count, also if this process is killed before the next write."""
        if not self._broken:
            return
        try:
            self._begin(self._number + 1)
        except Exception:  # no room for a new file; the next write tries again
            with contextlib.suppress(OSError):
                write_all(self._descriptor, [bytes(OVERHEAD_BYTES)], at=self._end)
                os.fdatasync(self._descriptor)

    def _begin(self, number: int) -> None:
        """Goes over to the next file, which says how much of this one counts."""
        if not self._broken:
            os.fdatasync(self._descriptor)
        descriptor, end = self._segments.create(number, previous_end=self._end)
        before, self._descriptor, self._number = self._descriptor, descriptor, number
        self._end = self._durable = end
        self._broken = False
        failpoint("journal.file_begun")
        with contextlib.suppress(OSError):  # it is synced, or does not count
            os.close(before)

    def _tell(self, batch: _Batch, failure: Exception | None, seconds: float) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._finish, batch, failure, seconds)


def _fail(done: asyncio.Future[Any], error: BaseException) -> None:
    if not done.done():
        done.set_exception(error)
        done.exception()  # nobody need ask


def _refusal(error: Exception) -> UnavailableError:
    return UnavailableError(
        f"the update could not be written to the journal ({error}); nothing was applied. Values "
        "can still be pulled; make room on the server's disk, and send it again",
        reason="JOURNAL_FAILED",
        retry_after=_RETRY_AFTER,
    )


def _ending(reason: Exception) -> UnavailableError:
    if isinstance(reason, UnavailableError):
        return reason
    return UnavailableError(
        f"a change that is in the journal could not be made ({reason}): this server ends, and is "
        "recovered when it is started again; try again",
        reason="SERVER_STOPPING",
    )
