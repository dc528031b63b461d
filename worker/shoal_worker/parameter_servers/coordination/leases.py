"""Sources of leased batches for loaders: the coordinator, which reassigns the batches of a dead
worker, or this process if it runs alone.

A worker leases batches in advance, enough to train for about `AsyncOptions.lease_ahead`. A separate
thread leases more batches and acknowledges finished ones. A step therefore does not wait for the
coordinator, and training continues for about `lease_ahead` while the coordinator is unreachable.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Protocol

from shoal_common.backoff import Backoff
from shoal_common.errors import DeadlineError, UnavailableError
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_worker.elastic.contract.loader_interface import Leases, StopTraining
from shoal_worker.parameter_servers.coordination.job import Job

_log = logging.getLogger(__name__)

_MOST_WANTED: Final = 1024
"""Maximum number of batches in one request, and maximum number that a worker keeps leased."""
_ACKNOWLEDGED_AFTER: Final = 6
"""Divisor of `lease_ahead`. Finished batches are acknowledged after at most a sixth of that time,
or earlier together with another request."""
_STALLED: Final = 2
"""Multiple of `lease_ahead`. A worker that does not finish a batch for this long returns all
batches that its loader has not received."""
_LONGEST_BACKOFF_S: Final = 1.0
_LOOK_S: Final = 0.2
"""Interval between checks whether this worker should leave, in seconds. SIGTERM cannot end a
wait."""
_LAST_WORD_S: Final = 5.0
"""Maximum time that a leaving worker tries to report its finished batches, in seconds."""
_SPARED: Final = 8
"""Number of superfluous batches that are not worth returning. Batches beyond twice the number that
the worker needs are superfluous."""
_NOTHING: Final = Leases(batches=(), epoch_done=False, retry_after_s=0.0)


class LeaseSource(Protocol):
    """Assigns the batches of each loader's epochs to workers, each batch to one worker. May be used
    only on the training thread."""

    def lease(
        self,
        *,
        loader: str,
        epoch: int,
        batches_in_epoch: int,
        finished: Sequence[int],
        want: int,
        at_hand: int | None = None,
    ) -> Leases:
        """Leases batches for a loader; see `LoaderSession.lease_batches`. Loaders take batches in
        the order of their leases, one at a time, and report `finished` before they take the next
        batch.

        `want`: number of batches. 0 if the script has left the loop: the worker's leases are then
        given up, except those of finished batches and of the batch `at_hand`.
        """
        ...

    def at_hand(self, loader: str) -> int:
        """Returns the key of `loader`'s batch in progress; 0 if there is none, or if it cannot be
        assigned to another worker. A key is unique in the job, and is the same on every member that
        works on the batch."""
        ...

    def newest_epoch(self, loader: str, epoch: int) -> int:
        """Returns the latest epoch of `loader` that any member has begun, or `epoch` if that is
        later."""
        ...

    def is_idle(self, loader: str) -> bool:
        """Returns whether this worker has no leased batch of `loader`."""
        ...

    def close(self) -> None:
        """Stops leasing. Idempotent."""
        ...


@dataclass(kw_only=True, eq=False)
class _Block:
    """This worker's batches of one epoch of one loader. Each batch is in one of four lists. Guarded
    by the lock of `CoordinatorLeases`."""

    loader: str
    epoch: int
    batches_in_epoch: int
    first_key: int = 0
    leased: deque[int] = field(default_factory=deque)
    """Leased batches that the loader has not received yet."""
    out: list[int] = field(default_factory=list)
    """Batches that the loader has received but not finished yet. The first one is in progress."""
    finished: list[int] = field(default_factory=list)
    """Finished batches that have not been reported to the coordinator yet. Their pushes have been
    acknowledged."""
    returned: list[int] = field(default_factory=list)
    """Batches to give back to the coordinator without having been trained on; not reported yet."""
    loop_left: bool = False
    """True if the script is currently not taking batches from the loader. No batches are then
    leased in advance."""
    wanted: int = 0
    """Number of batches that the training thread is waiting for; 0 if it is not waiting."""
    asking: bool = False
    """True if a request about this block is in progress."""
    unsaid_since: float = 0.0
    """Time since which the oldest batch in `finished` has been waiting to be reported: when it was
    finished, or when the coordinator last responded. `finished_at`: time when the last batch was
    finished, or when the epoch began."""
    finished_at: float = 0.0
    pace_s: float = 0.0
    """Average time from one finished batch to the next, in seconds; 0: unknown."""
    asks_below: int = 1
    """More batches are requested when fewer than this number are leased. After each response, it is
    set to about half of the leased batches. 0: the coordinator has no more batches. The next
    request is then sent once another batch is finished, or if the training thread is waiting."""
    answer: pb.LeaseBatchesResponse | None = None
    """The coordinator's last response."""
    failure: Exception | None = None
    """Error of a request that the coordinator rejected. The training thread raises it."""

    @property
    def is_settled(self) -> bool:
        """True if everything has been reported to the coordinator."""
        return not (self.finished or self.returned or self.asking)


@dataclass(frozen=True, kw_only=True)
class _Request:
    block: _Block
    want: int
    finished: tuple[int, ...]
    returned: tuple[int, ...]
    sequence: int
    waited_for: bool
    batch_ms: int


class CoordinatorLeases:
    """Leases from the coordinator. The training thread takes and finishes batches. A separate
    thread sends numbered requests to the coordinator, one after another, and retries each request
    until it is answered, so that no batch is lost if a response is lost."""

    def __init__(self, job: Job, *, ahead: timedelta) -> None:
        """Creates the leases. `ahead`: see `AsyncOptions.lease_ahead`."""
        self._job = job
        self._ahead_s = ahead.total_seconds()
        self._blocks: dict[str, _Block] = {}
        """Newest block of each loader. A block is replaced only once it is settled."""
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._numbered = 0
        """Number of the last request. May be used only on the request thread."""
        self._trouble = ""
        """Reason why the coordinator has not responded yet."""

    def lease(
        self,
        *,
        loader: str,
        epoch: int,
        batches_in_epoch: int,
        finished: Sequence[int],
        want: int,
        at_hand: int | None = None,
    ) -> Leases:
        """Implements `LeaseSource.lease`.

        Raises:
            StopTraining: this worker has nothing left to do and should leave, or has left.
            DeadlineError: the coordinator was unreachable for too long.
            ShoalError: the coordinator rejected the request.
        """
        with self._changed:
            block = self._block(loader, epoch, batches_in_epoch)
            _finish(block, finished)
            if want == 0:
                self._leave(block, at_hand)
                return _NOTHING
            if block.loop_left:
                # the time between two loops is not part of a step
                block.loop_left, block.finished_at = False, time.monotonic()
            if block.failure is not None:
                raise _taken(block)
            if not block.leased:
                if block.out:  # these batches suffice for this step
                    block.asks_below = 1
                    self._changed.notify_all()
                    return _NOTHING
                block.wanted = want
                try:
                    self._await(
                        block, lambda: bool(block.leased) or not block.wanted, for_batches=True
                    )
                finally:
                    block.wanted = 0
            answer = block.answer
            given = tuple(block.leased.popleft() for _ in range(min(want, len(block.leased))))
            block.out += given
            self._changed.notify_all()  # fewer than half of the batches may remain
            done = answer is not None and answer.epoch_done
            return Leases(
                batches=given,
                epoch_done=done,
                retry_after_s=0.0 if answer is None else answer.retry_after_ms / 1000,
            )

    def at_hand(self, loader: str) -> int:
        """Implements `LeaseSource.at_hand`."""
        with self._changed:
            block = self._blocks.get(loader)
            return 0 if block is None or not block.out else block.first_key + block.out[0]

    def newest_epoch(self, loader: str, epoch: int) -> int:
        """Implements `LeaseSource.newest_epoch`. Raises DeadlineError, or StopTraining if this
        worker should leave."""
        answer = self._job.retry_until(
            "the coordinator",
            lambda: self._job.lease_batches(loader=loader, epoch=epoch, batches_in_epoch=0, want=0),
        )
        return max(epoch, answer.newest_epoch)

    def is_idle(self, loader: str) -> bool:
        """Implements `LeaseSource.is_idle`."""
        with self._changed:
            block = self._blocks[loader]
            return not block.out and not block.leased

    def close(self) -> None:
        """Implements `LeaseSource.close`. Leased batches that are not acknowledged will be
        reassigned to other workers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread, self._thread = self._thread, None  # a second `close` does not wait again
        if thread is not None:
            thread.join(_LAST_WORD_S)

    # ----------------------------------------------------------- the training thread, with the lock

    def _block(self, loader: str, epoch: int, batches_in_epoch: int) -> _Block:
        block = self._blocks.get(loader)
        if block is not None and block.epoch == epoch:
            return block
        if block is not None:
            # including the loader's last batch, which until now could still have been finished
            self._leave(block, None)
        pace_s = 0.0 if block is None else block.pace_s
        block = self._blocks[loader] = _Block(
            loader=loader,
            epoch=epoch,
            batches_in_epoch=batches_in_epoch,
            pace_s=pace_s,
            finished_at=time.monotonic(),
        )
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shoal-leases", daemon=True)
            self._thread.start()
        return block

    def _leave(self, block: _Block, at_hand: int | None) -> None:
        """Gives all batches except `at_hand` back to the coordinator. They stop belonging to this
        worker immediately, before the coordinator has been notified."""
        block.loop_left = True
        block.returned += [batch for batch in (*block.out, *block.leased) if batch != at_hand]
        block.out = [batch for batch in block.out if batch == at_hand]
        block.leased.clear()
        if not block.is_settled:
            self._await(block, lambda: block.is_settled, for_batches=False)

    def _await(self, block: _Block, done: Callable[[], bool], *, for_batches: bool) -> None:
        """Waits until the request thread makes `done()` true. Raises the same errors as `lease`."""
        begun = time.monotonic()
        leaving_since: float | None = None
        block.failure = None
        self._changed.notify_all()
        while not done():
            if block.failure is not None:
                raise _taken(block)
            now = time.monotonic()
            if self._closed:
                if for_batches:
                    raise StopTraining("this worker has left its job")
                return
            if self._job.leaving:
                if for_batches:
                    raise self._job.departure()
                leaving_since = leaving_since or now
            if now - begun > self._job.patience.total_seconds() or (
                leaving_since is not None and now - leaving_since > _LAST_WORD_S
            ):
                raise DeadlineError(
                    f"waited {now - begun:.0f} s for the coordinator to answer a request for "
                    "batches of loader "
                    f"{block.loader!r}{f': {self._trouble}' if self._trouble else ''}; check "
                    "that it is running, or restart it with its Redis"
                )
            self._changed.wait(_LOOK_S)

    # --------------------------------------------------------------------------- the request thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (request := self._due()) is None:
                    self._changed.wait(_LOOK_S)
                if self._closed:
                    return
                assert request is not None
                request.block.asking = True
            answer = self._ask(request)
            with self._changed:
                self._take(request, answer)
                self._changed.notify_all()

    def _due(self) -> _Request | None:
        """Returns the next request, or None if none is due."""
        now = time.monotonic()
        for block in self._blocks.values():
            if block.failure is not None and not block.wanted:
                continue  # skipped until the training thread requests batches
            enough = self._enough(block)
            if (
                block.leased
                and self._ahead_s
                and now - block.finished_at > _STALLED * self._ahead_s
            ):
                # The worker may be evaluating inside its loop. Other workers should not wait for
                # batches that it has leased in advance.
                block.returned += block.leased
                block.leased.clear()
                block.asks_below = 0
            if enough and len(block.leased) > 2 * enough + _SPARED and not block.loop_left:
                # This worker has become slower, and other workers need these batches.
                block.returned += [block.leased.pop() for _ in range(len(block.leased) - enough)]
            missing = min(max(enough - len(block.leased), 0), _MOST_WANTED)
            late = (
                bool(block.finished)
                and self._ahead_s > 0
                and now - block.unsaid_since > self._ahead_s / _ACKNOWLEDGED_AFTER
            )
            runs_out = (
                not block.loop_left
                and 2 * missing > enough
                and len(block.leased) < block.asks_below
            )
            want = max(block.wanted, missing) if block.wanted else missing if runs_out else 0
            if want or block.returned or late or (block.loop_left and block.finished):
                self._numbered += 1
                return _Request(
                    block=block,
                    want=want,
                    finished=tuple(block.finished),
                    returned=tuple(block.returned),
                    sequence=self._numbered,
                    waited_for=bool(block.wanted),
                    batch_ms=math.ceil(1000 * block.pace_s),
                )
        return None

    def _enough(self, block: _Block) -> int:
        if not block.pace_s or not self._ahead_s:
            return 0
        return min(_MOST_WANTED, 1 + int(self._ahead_s / block.pace_s))

    def _ask(self, request: _Request) -> pb.LeaseBatchesResponse | Exception | None:
        """Sends a request and returns the response or the error. Returns None if this object is
        closed before that."""
        block = request.block
        backoff = Backoff(longest_s=_LONGEST_BACKOFF_S)
        logged = False
        while True:
            try:
                return self._job.lease_batches(
                    loader=block.loader,
                    epoch=block.epoch,
                    batches_in_epoch=block.batches_in_epoch,
                    want=request.want,
                    finished=request.finished,
                    returned=request.returned,
                    sequence=request.sequence,
                    batch_ms=request.batch_ms,
                )
            except (UnavailableError, DeadlineError) as error:
                if error.reason == "CLIENT_CLOSED":
                    return error
                self._trouble = str(error)
                if not logged:
                    _log.warning(
                        "cannot lease further batches from the coordinator; %d leased batches "
                        "are left: %s",
                        len(block.leased),
                        error,
                    )
                    logged = True
                wait_s = backoff.next_s(error)
            except Exception as error:  # of any kind, because the training thread raises it
                return error
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, wait_s):
                    return None

    def _take(self, request: _Request, answer: pb.LeaseBatchesResponse | Exception | None) -> None:
        block = request.block
        block.asking = False
        self._trouble = ""
        if isinstance(answer, Exception):
            _log.warning(
                "the coordinator refused to lease batches of loader %r: %s", block.loader, answer
            )
            block.failure = answer
            return
        if answer is None:
            return
        del block.finished[: len(request.finished)]
        del block.returned[: len(request.returned)]
        block.unsaid_since = time.monotonic()
        # If the script has left the loop since the request, nothing takes these batches.
        (block.returned if block.loop_left else block.leased).extend(answer.batches)
        if answer.batches and (block.wanted or request.waited_for):
            # the loop was waiting for these batches; it was not idle, but the wait is not part of a
            # step
            block.finished_at = time.monotonic()
        block.asks_below = len(block.leased) // 2 + 1 if block.leased else 0
        if request.waited_for:
            block.wanted = 0
        block.first_key = answer.first_key or block.first_key
        block.answer = answer


def _taken(block: _Block) -> Exception:
    failure, block.failure = block.failure, None
    assert failure is not None
    return failure


def _finish(block: _Block, finished: Sequence[int]) -> None:
    now = time.monotonic()
    for batch in finished:
        if batch not in block.out:
            continue  # retried because the first response was an error
        block.out.remove(batch)
        if not block.finished:
            block.unsaid_since = now
        block.finished.append(batch)
        block.asks_below = max(1, block.asks_below)
        taken_s = now - block.finished_at
        block.pace_s = taken_s if not block.pace_s else block.pace_s + (taken_s - block.pace_s) / 4
        block.finished_at = now


class LocalLeases:
    """Leases for a process that is the only worker: all batches of an epoch, in order."""

    def __init__(self) -> None:
        self._dealt: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._returned: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self._open: defaultdict[tuple[str, int], set[int]] = defaultdict(set)

    def lease(
        self,
        *,
        loader: str,
        epoch: int,
        batches_in_epoch: int,
        finished: Sequence[int],
        want: int,
        at_hand: int | None = None,
    ) -> Leases:
        """Implements `LeaseSource.lease`."""
        key = (loader, epoch)
        self._open[key] -= set(finished)
        if want == 0:
            back = self._open[key] - {at_hand}
            self._returned[key] = sorted({*self._returned[key], *back})
            self._open[key] -= back
        again, self._returned[key] = self._returned[key][:want], self._returned[key][want:]
        first = self._dealt[key]
        fresh = range(first, min(first + want - len(again), batches_in_epoch))
        self._dealt[key] += len(fresh)
        batches = (*again, *fresh)
        self._open[key] |= set(batches)
        done = (
            self._dealt[key] == batches_in_epoch and not self._open[key] and not self._returned[key]
        )
        return Leases(batches=batches, epoch_done=done, retry_after_s=0.0)

    def at_hand(self, loader: str) -> int:
        """Implements `LeaseSource.at_hand`. Returns 0, because there are no other members."""
        return 0

    def newest_epoch(self, loader: str, epoch: int) -> int:
        """Implements `LeaseSource.newest_epoch`."""
        return epoch

    def is_idle(self, loader: str) -> bool:
        """Implements `LeaseSource.is_idle`."""
        return True

    def close(self) -> None:
        """Implements `LeaseSource.close`."""
