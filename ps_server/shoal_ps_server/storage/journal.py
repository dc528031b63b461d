"""Appends records to the journal in the given order, many per sync. Once a record is on disk, its
effect is called; effects are called in the same order.

Threads: the event loop calls `append` and `rotate`, and calls the effects; a separate thread
writes. The two share only the queue.

If the disk does not accept a batch of records, neither this batch nor any records appended during
the write take effect; their callers get an error. The next append starts a new file, which records
that the failed batch is invalid.

With `hold`, each record must also be received by another server, the follower. The record's effect
then waits until the follower has confirmed the record.
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
"""Maximum number of bytes written in one batch, before the effects of its records are called."""
_RETRY_AFTER: Final = timedelta(seconds=2)
"""Suggested delay before a client retries. A full disk is unlikely to have free space sooner, and a
push is megabytes in size."""
_LOG_EVERY_S: Final = 10.0
_MOST_AT_ONCE_S: Final = 0.005
"""Maximum time in seconds that effects are called consecutively before other tasks of the loop
run."""


class Follower(Protocol):
    """Receiver of every record, in order. Its methods are called on the event loop."""

    def made(self, record: Record) -> None:
        """Called while effects do not wait for the follower, with a record that is on disk and
        whose effect has been called."""

    def written(self, record: Record) -> int:
        """Called while effects wait for the follower, with a record that is on disk. Returns the
        record's position. Its effect is called once this position is confirmed."""


@dataclass(kw_only=True)
class _Entry(Generic[T]):
    record: Record | None
    """Record to write; None if there is none."""
    effect: Callable[[], T]
    refused: Callable[[], None]
    done: asyncio.Future[T]
    rotates: bool = False
    """True if this entry starts the next file."""
    number: int = 0
    """Number of the file that starts with this entry. It is set before the loop is notified."""
    over: bool = False
    """True if the entry's effect has been called or the entry was refused. Belongs to the loop."""
    position: int = 0
    """Position that the follower must confirm before the effect is called. Belongs to the loop."""


class _Control(enum.Enum):
    RESUME = "resume"
    """The loop has been notified of the failure: entries that follow in the queue were appended
    with this knowledge."""
    CLOSE = "close"


@dataclass(kw_only=True)
class _Batch:
    entries: list[_Entry[Any]] = field(default_factory=list)
    nbytes: int = 0


class Journal:
    """Journal of one server. Must be created on the event loop, and closed with `close`."""

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
        """Starts file `number`. Raises OSError.

        Args:
            segments: the journal's files.
            number: number of the file to start.
            previous_end: number of valid bytes in the previous file.
            fsync: policy for syncing the file.
            failed: called if an effect raises an error. Memory then lacks changes that are on disk,
                so the server must exit and recover.
            written: called after each batch with its number of records, bytes and seconds.
            unwritten: called for each batch that the disk did not accept.
        """
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
        """Number of bytes of the file known to be on disk; `_end`: number of valid bytes."""
        self._pending: deque[_Entry[Any]] = deque()
        """Entries that may not have been written yet. Belongs to the loop."""
        self._ready: deque[_Entry[Any]] = deque()
        """Entries that have been written but whose effects have not been called. Belongs to the
        loop."""
        self._refusal: Exception | None = None
        """Reason why the entries in `_pending` cannot be written. They are refused once `_ready` is
        empty. Belongs to the loop, like the fields below."""
        self._making_soon = False
        """True if a call to `_make_some` is scheduled."""
        self._follower: Follower | None = None
        self._holding = False
        self._position = 0
        """Position of the last record that was passed to the follower while effects wait for it;
        `_confirmed`: last position that the follower has confirmed."""
        self._confirmed = 0
        self.write_error: Exception | None = None
        """Error of the last write; None if it succeeded. Set on the loop; may be read on any
        thread."""
        self._unmade: Exception | None = None
        """Reason why no further effects are called: an effect has failed, or `give_up` was called.
        Belongs to the loop."""
        self._broken = False
        """True if the file may end with an incomplete batch. Belongs to the writing thread."""
        self._unwritten_batches = 0
        """Number of batches refused since the last successful write; `_logged_at`: time of the last
        log message about them. Belongs to the writing thread."""
        self._logged_at = -math.inf
        self._held: _Entry[Any] | None = None
        """Entry that was taken from the queue and will be the first of the next batch; None if
        there is none."""
        self.bytes_since_rotation = segments.nbytes()
        """Number of bytes written since the last `rotate` or, after a start, number of bytes that a
        recovery would have to read. Belongs to the loop."""
        self._thread = threading.Thread(target=self._write, name="shoal-ps-journal", daemon=True)
        self._thread.start()

    def append(
        self,
        record: Record | None,
        effect: Callable[[], T],
        *,
        refused: Callable[[], None] = lambda: None,
    ) -> asyncio.Future[T]:
        """Writes a record, then calls `effect` on the loop. Returns a future for the result of
        `effect`; it fails with UnavailableError / JOURNAL_FAILED if the record cannot be written.

        `record`: None to wait for all earlier records without writing one. `refused`: called in
        place of `effect` if the record cannot be written.
        """
        return self._put(
            _Entry(record=record, effect=effect, refused=refused, done=self._loop.create_future())
        )

    def rotate(self, effect: Callable[[int], T]) -> asyncio.Future[T]:
        """Starts the next file. Calls `effect` with the new file's number, after the effects of all
        records in earlier files and before the effects of its own records. Returns a future for the
        result of `effect`; it fails with UnavailableError / JOURNAL_FAILED if the file cannot be
        started."""
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
        """Sets the follower, in place of an earlier one. The follower receives each record after
        the record's effect has been called. May be called by an effect."""
        assert not self._holding, "the one before has been let go"
        self._follower = follower

    def hold(self, *, position: int, confirmed: int) -> None:
        """Makes effects wait for the follower. From now on, the follower receives each record
        before the record's effect is called, and the effect waits until `confirm` confirms the
        record. May be called by an effect.

        `position`: position of the last record that the follower has received. `confirmed`:
        position of the last record that it has confirmed.
        """
        assert self._follower is not None, "somebody follows"
        self._holding, self._position, self._confirmed = True, position, confirmed
        for entry in self._ready:
            self._give(entry)

    def confirm(self, position: int) -> None:
        """Records that the follower has received all records up to `position`, so that their
        effects can be called."""
        self._confirmed = max(self._confirmed, position)
        self._make_soon()

    def follow_no_more(self) -> None:
        """Removes the follower. Effects no longer wait."""
        self._follower, self._holding = None, False
        self._make_soon()

    @property
    def holds(self) -> bool:
        """True if effects wait for a follower."""
        return self._holding

    @property
    def is_broken(self) -> bool:
        """True if no further effects are called, because one has failed or `give_up` was called.
        Memory may then lack changes that are on disk."""
        return self._unmade is not None

    @property
    def end(self) -> tuple[int, int]:
        """Number of the last file, and number of its valid bytes. Must not be read before
        `close`."""
        return self._number, self._end

    def give_up(self, reason: UnavailableError) -> None:
        """Prevents all further effects. All callers waiting for an effect get the error
        `reason`."""
        if self._unmade is None:
            self._unmade = reason
        self._follower, self._holding = None, False
        self._make_soon()

    async def close(self) -> None:
        """Waits until all appended records are written, but not for the follower. No records may be
        appended after that."""
        self._queue.put(_Control.CLOSE)
        # the thread has reported everything to the loop before this returns
        await asyncio.to_thread(self._thread.join)
        if self._holding and self._ready:
            self.give_up(
                UnavailableError(
                    "this server is stopping, and its backup has not confirmed the change; try "
                    "again",
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
        """Handles a batch after the writing thread has processed it: makes its entries ready or,
        after an error, refuses them."""
        if all(entry.over for entry in batch.entries):
            return  # already refused together with an earlier batch
        if error is not None:
            # The effects of records that were written earlier are called first, since later
            # admissions depend on them.
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
        if not entry.done.done():  # the caller may have been cancelled
            entry.done.set_result(result)
        if entry.record is not None and self._follower is not None and not self._holding:
            self._follower.made(entry.record)

    def _refuse(self, error: Exception) -> None:
        """Refuses all pending entries together, so that no later admission depends on a refused
        entry."""
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
                self._acknowledge(batch, failure, time.perf_counter() - started)
            if control is _Control.RESUME:
                failure = None
            elif control is _Control.CLOSE:
                break
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def _next(self) -> tuple[_Batch, _Control | None]:
        """Waits for entries, and returns the next batch. If a control message follows the batch,
        returns it too."""
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
        """Writes a batch to disk. Returns the error if the write failed. After an error, the caller
        can continue with the next batch."""
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
                "resumed writing the journal",
                extra={"batches_refused": self._unwritten_batches},
            )
            self._unwritten_batches, self._logged_at = 0, -math.inf
        return None

    def _log_failure(self, error: Exception) -> None:
        """Logs a failure immediately and then every ten seconds, since clients keep retrying
        refused updates."""
        self._unwritten_batches += 1
        now = time.monotonic()
        if now >= self._logged_at + _LOG_EVERY_S:
            self._logged_at = now
            logger.error(
                "could not write the journal; updates are refused until it is writable",
                extra={"error": error, "batches_refused": self._unwritten_batches},
            )

    def _disown(self) -> None:
        """Invalidates any data that a failed write or sync has left in the file, since its extent
        is unknown. The invalidation must be on disk before anything else is written."""
        if not self._broken:
            return
        try:
            self._begin(self._number + 1)
        except Exception:  # the disk has no space for a new file; the next write tries again
            with contextlib.suppress(OSError):
                write_all(self._descriptor, [bytes(OVERHEAD_BYTES)], at=self._end)
                os.fdatasync(self._descriptor)

    def _begin(self, number: int) -> None:
        """Switches to the next file, whose first record states how many bytes of the current file
        are valid."""
        if not self._broken:
            os.fdatasync(self._descriptor)
        descriptor, end = self._segments.create(number, previous_end=self._end)
        before, self._descriptor, self._number = self._descriptor, descriptor, number
        self._end = self._durable = end
        self._broken = False
        failpoint("journal.file_begun")
        with contextlib.suppress(OSError):
            # an error here is harmless, since the old file is synced or no longer needed
            os.close(before)

    def _acknowledge(self, batch: _Batch, failure: Exception | None, seconds: float) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._finish, batch, failure, seconds)


def _fail(done: asyncio.Future[Any], error: BaseException) -> None:
    if not done.done():
        done.set_exception(error)
        done.exception()  # avoids asyncio's warning about an exception that was never retrieved


def _refusal(error: Exception) -> UnavailableError:
    return UnavailableError(
        f"could not write the update to the journal ({error}), so it was not applied; free some "
        "space on the server's disk, and send the update again. Values can still be pulled",
        reason="JOURNAL_FAILED",
        retry_after=_RETRY_AFTER,
    )


def _ending(reason: Exception) -> UnavailableError:
    if isinstance(reason, UnavailableError):
        return reason
    return UnavailableError(
        f"could not apply a change from the journal ({reason}), so this server is exiting and "
        "will recover when it is restarted; try again",
        reason="SERVER_STOPPING",
    )
