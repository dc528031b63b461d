"""Where the batches of leased loaders come from: the coordinator, who deals a dead worker's again, or this process when it is alone.

A worker leases blocks of batches ahead, enough for `lease_ahead`, and a thread renews them and acknowledges what is finished. So a step
needs no answer of the coordinator's, and training goes on for about that long while it is away.
"""

from __future__ import annotations

import logging
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

from shoal_worker.asynchronous.job import Job
from shoal_worker.elastic.loader_interface import Leases

_log = logging.getLogger(__name__)

_MOST_WANTED: Final = 1024
"""In one request; also what a worker holds at most."""
_ACKNOWLEDGED_AFTER: Final = 6
"""What is finished is acknowledged within one part of so many of `lease_ahead`, if nothing else asks earlier."""
_LONGEST_BACKOFF_S: Final = 1.0
_LOOK_S: Final = 0.2
"""Between two looks at whether this worker is to leave: SIGTERM cannot notify."""
_LAST_WORD_S: Final = 5.0
"""How long a worker that leaves tries to say what it has finished."""


class LeaseSource(Protocol):
    """Gives out the batches of each loader's epochs, each to one worker. Used by the training thread."""

    def lease(self, *, loader: str, epoch: int, batches_in_epoch: int, finished: Sequence[int], want: int) -> Leases:
        """See `LoaderSession.lease_batches`. Loaders take batches in the order in which they were leased, one at a time, and say `finished`
        before they take the next. `want` 0: the loop is left; beside those finished, what is still leased goes back."""
        ...

    def at_hand(self, loader: str) -> int:
        """Key of the batch of `loader` that is being worked on: the same in whichever member has it, and of no other batch of the job.
        0: it cannot come to another member."""
        ...

    def newest_epoch(self, loader: str, epoch: int) -> int:
        """The furthest epoch of `loader` that any member has begun, if it is above `epoch`; else that."""
        ...

    def is_idle(self, loader: str) -> bool:
        """`loader` has no batch of this worker's left."""
        ...

    def close(self) -> None:
        """Nothing is leased any more. Idempotent."""
        ...


@dataclass(kw_only=True, eq=False)
class _Block:
    """What this worker has of one epoch of one loader. Guarded by the lock of `CoordinatorLeases`; `numbered` is the thread's."""

    loader: str
    epoch: int
    batches_in_epoch: int
    first_key: int = 0
    leased: deque[int] = field(default_factory=deque)
    """Not handed to the loader yet."""
    out: list[int] = field(default_factory=list)
    """Handed to the loader and not finished; the first one is at hand."""
    finished: list[int] = field(default_factory=list)
    """Not acknowledged yet."""
    finished_at: float = 0.0
    """When the last one was finished; and `unsaid_since`: when the first one was that is not acknowledged."""
    unsaid_since: float = 0.0
    pace_s: float = 0.0
    """Seconds from one finished batch to the next, averaged; 0: not known."""
    dry: bool = False
    """The coordinator had no more, the last time."""
    wanted: int = 0
    """The training thread waits until so many were asked for."""
    goes_back: bool = False
    """The training thread waits until all of it is acknowledged or given back."""
    answer: pb.LeaseBatchesResponse | None = None
    """The last one."""
    failure: Exception | None = None
    """What the coordinator refused the last request with."""
    trouble: str = ""
    """Why it has not answered yet."""
    numbered: int = 0
    """Number of the last request."""


class CoordinatorLeases:
    """Leases of the coordinator's. The training thread takes and finishes batches; a thread of its own speaks to the coordinator, one
    numbered request after the other, each said again until it is answered: so none is lost with an answer."""

    def __init__(self, job: Job, *, ahead: timedelta) -> None:
        """`ahead`: how much work to have, going by the pace so far."""
        self._job = job
        self._ahead_s = ahead.total_seconds()
        self._blocks: dict[str, _Block] = {}
        """The newest of each loader."""
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def lease(self, *, loader: str, epoch: int, batches_in_epoch: int, finished: Sequence[int], want: int) -> Leases:
        """See `LeaseSource`.

        Raises:
            StopTraining: this worker has nothing left to do, and is to leave.
            DeadlineError: the coordinator was away for too long.
            ShoalError: what it refuses.
        """
        with self._changed:
            block = self._block(loader, epoch, batches_in_epoch)
            _finish(block, finished)
            if want == 0:
                self._give_back(block)
                return Leases(batches=(), epoch_done=False, retry_after_s=0.0)
            if not block.leased:
                block.wanted = want
                self._await(block, lambda: bool(block.leased) or not block.wanted)
                block.wanted = 0
            answer = block.answer
            given = tuple(block.leased.popleft() for _ in range(min(want, len(block.leased))))
            block.out += given
            self._changed.notify_all()  # there may be less than half left
            done = answer is not None and answer.epoch_done
            return Leases(batches=given, epoch_done=done, retry_after_s=0.0 if answer is None else answer.retry_after_ms / 1000)

    def at_hand(self, loader: str) -> int:
        """See `LeaseSource`."""
        with self._changed:
            block = self._blocks[loader]
            return block.first_key + block.out[0]

    def newest_epoch(self, loader: str, epoch: int) -> int:
        """See `LeaseSource`. Raises DeadlineError, and StopTraining when this worker is to leave."""
        answer = self._job.insist(
            "the coordinator",
            lambda: self._job.lease_batches(loader=loader, epoch=epoch, batches_in_epoch=0, want=0, finished=(), sequence=0),
        )
        return max(epoch, answer.newest_epoch)

    def close(self) -> None:
        """See `LeaseSource`. What is leased or not acknowledged is dealt again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_LAST_WORD_S)

    def is_idle(self, loader: str) -> bool:
        """See `LeaseSource`."""
        with self._changed:
            block = self._blocks[loader]
            return not block.out and not block.leased

    # ------------------------------------------------------------------------------------------ the training thread, with the lock

    def _block(self, loader: str, epoch: int, batches_in_epoch: int) -> _Block:
        block = self._blocks.get(loader)
        if block is not None and block.epoch == epoch:
            return block
        if block is not None:
            # Its loop was left with a batch that was handed out, and could still be finished until now.
            self._give_back(block)
        pace_s = 0.0 if block is None else block.pace_s
        block = self._blocks[loader] = _Block(loader=loader, epoch=epoch, batches_in_epoch=batches_in_epoch, pace_s=pace_s)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shoal-leases", daemon=True)
            self._thread.start()
        return block

    def _give_back(self, block: _Block) -> None:
        if not (block.leased or block.out or block.finished):
            return
        block.goes_back = True
        self._await(block, lambda: not block.goes_back)

    def _await(self, block: _Block, done: Callable[[], bool]) -> None:
        """Returns when the thread has done what is asked of it, or this object is closed. Raises as `lease`."""
        begun = time.monotonic()
        leaving_since: float | None = None
        patience_s = self._job.patience.total_seconds()
        block.failure = None
        self._changed.notify_all()
        while not done() and not self._closed:
            now = time.monotonic()
            if self._job.leaving:
                if block.wanted:
                    raise self._job.departure()
                leaving_since = leaving_since or now
            if now - begun > patience_s or (leaving_since is not None and now - leaving_since > _LAST_WORD_S):
                block.wanted, block.goes_back = 0, False
                raise DeadlineError(
                    f"waited {now - begun:.0f} s for the coordinator to lease batches of loader {block.loader!r}: {block.trouble}"
                )
            self._changed.wait(_LOOK_S)
        if block.failure is not None:
            raise block.failure

    # -------------------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (due := self._due()) is None:
                    self._changed.wait(_LOOK_S)
                if self._closed:
                    return
                assert due is not None
                block, want = due
                finished, waited_for = tuple(block.finished), block.wanted
                block.numbered += 1
            answer = self._ask(block, finished, want)
            with self._changed:
                if isinstance(answer, Exception):
                    block.failure = answer
                    block.goes_back, block.wanted = False, 0
                elif answer is not None:
                    self._take(block, finished, want, answer)
                    if waited_for:
                        block.wanted = 0
                self._changed.notify_all()

    def _due(self) -> tuple[_Block, int] | None:
        """The next request: a block, and how many batches to ask for."""
        for block in self._blocks.values():
            if block.goes_back:
                return block, 0
            missing = self._enough(block) - len(block.leased)
            if block.wanted:
                return block, max(block.wanted, min(missing, _MOST_WANTED))
            if block.failure is not None:
                continue  # until the training thread asks
            late = (
                bool(block.finished) and self._ahead_s > 0 and time.monotonic() - block.unsaid_since > self._ahead_s / _ACKNOWLEDGED_AFTER
            )
            if late or (not block.dry and 2 * missing > self._enough(block)):
                return block, max(1, min(missing, _MOST_WANTED))
        return None

    def _enough(self, block: _Block) -> int:
        if not block.pace_s or not self._ahead_s:
            return 0
        return min(_MOST_WANTED, 1 + int(self._ahead_s / block.pace_s))

    def _ask(self, block: _Block, finished: Sequence[int], want: int) -> pb.LeaseBatchesResponse | Exception | None:
        """None: this object was closed meanwhile."""
        backoff = Backoff(longest_s=_LONGEST_BACKOFF_S)
        told = False
        while True:
            try:
                return self._job.lease_batches(
                    loader=block.loader,
                    epoch=block.epoch,
                    batches_in_epoch=block.batches_in_epoch,
                    want=want,
                    finished=finished,
                    sequence=block.numbered,
                )
            except (UnavailableError, DeadlineError) as error:
                if error.reason == "CLIENT_CLOSED":
                    return error
                block.trouble = str(error)
                if not told:
                    _log.warning("the coordinator leases no batches now, %d are left: %s", len(block.leased), error)
                    told = True
            except Exception as error:  # whatever it is, the training thread is to raise it
                return error
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, backoff.next_s()):
                    return None

    @staticmethod
    def _take(block: _Block, finished: Sequence[int], want: int, answer: pb.LeaseBatchesResponse) -> None:
        del block.finished[: len(finished)]
        block.unsaid_since = time.monotonic()
        if want == 0:
            block.leased.clear()
            block.out.clear()
            block.goes_back = False
        block.leased += answer.batches
        block.dry = not answer.batches
        block.first_key = answer.first_key or block.first_key
        block.answer = answer


def _finish(block: _Block, finished: Sequence[int]) -> None:
    now = time.monotonic()
    for batch in finished:
        if batch not in block.out:
            continue  # said again, since the answer to the first time was an error
        block.out.remove(batch)
        if not block.finished:
            block.unsaid_since = now
        block.finished.append(batch)
        if block.finished_at:
            taken_s = now - block.finished_at
            block.pace_s = taken_s if not block.pace_s else block.pace_s + (taken_s - block.pace_s) / 4
        block.finished_at = now


class LocalLeases:
    """Leases in a world of one, where nobody else asks: the batches of an epoch in their order."""

    def __init__(self) -> None:
        self._dealt: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._returned: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self._open: defaultdict[tuple[str, int], set[int]] = defaultdict(set)

    def lease(self, *, loader: str, epoch: int, batches_in_epoch: int, finished: Sequence[int], want: int) -> Leases:
        """See `LeaseSource`."""
        key = (loader, epoch)
        self._open[key] -= set(finished)
        if want == 0:
            self._returned[key] = sorted({*self._returned[key], *self._open[key]})
            self._open[key].clear()
        again, self._returned[key] = self._returned[key][:want], self._returned[key][want:]
        first = self._dealt[key]
        fresh = range(first, min(first + want - len(again), batches_in_epoch))
        self._dealt[key] += len(fresh)
        batches = (*again, *fresh)
        self._open[key] |= set(batches)
        done = self._dealt[key] == batches_in_epoch and not self._open[key] and not self._returned[key]
        return Leases(batches=batches, epoch_done=done, retry_after_s=0.0)

    def at_hand(self, loader: str) -> int:
        """See `LeaseSource`: nobody else is there."""
        return 0

    def newest_epoch(self, loader: str, epoch: int) -> int:
        """See `LeaseSource`."""
        return epoch

    def is_idle(self, loader: str) -> bool:
        """See `LeaseSource`."""
        return True

    def close(self) -> None:
        """See `LeaseSource`."""
