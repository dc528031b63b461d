"""Where the batches of leased loaders come from: the coordinator, who deals a dead worker's again,
or this process when it is alone.

A worker leases blocks of batches ahead, enough for `lease_ahead`, and a thread renews them and
acknowledges what is finished. So a step needs no answer of the coordinator's, and training goes on
for about that long while it is away.
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

from shoal_worker.asynchronous.job import Job
from shoal_worker.elastic.loader_interface import Leases, StopTraining

_log = logging.getLogger(__name__)

_MOST_WANTED: Final = 1024
"""Batches that a worker asks for in one request, and holds at most."""
_ACKNOWLEDGED_AFTER: Final = 6
"""What is finished is acknowledged within one part of so many of `lease_ahead`, if nothing else
asks earlier."""
_STANDS_STILL: Final = 2
"""A worker that has finished nothing for so many times `lease_ahead` gives back what it holds
beside the batches handed out."""
_LONGEST_BACKOFF_S: Final = 1.0
_LOOK_S: Final = 0.2
"""Between two looks at whether this worker is to leave: SIGTERM cannot notify."""
_LAST_WORD_S: Final = 5.0
"""How long a worker that leaves tries to say what it has finished."""
_SPARED: Final = 8
"""So many batches above twice enough are not worth giving back."""
_NOTHING: Final = Leases(batches=(), epoch_done=False, retry_after_s=0.0)


class LeaseSource(Protocol):
    """Gives out the batches of each loader's epochs, each to one worker. Used by the training
    thread."""

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
        """See `LoaderSession.lease_batches`. Loaders take batches in the order in which they were
        leased, one at a time, and say `finished` before they take the next. `want` 0: the loop is
        left; beside those finished, what is still leased goes back, but `at_hand`."""
        ...

    def at_hand(self, loader: str) -> int:
        """Key of the batch of `loader` that is being worked on: the same in whichever member has
        it, and of no other batch of the job. 0: there is none, or it cannot come to another
        member."""
        ...

    def newest_epoch(self, loader: str, epoch: int) -> int:
        """The furthest epoch of `loader` that any member has begun, if it is above `epoch`; else
        that."""
        ...

    def is_idle(self, loader: str) -> bool:
        """`loader` has no batch of this worker's left."""
        ...

    def close(self) -> None:
        """Nothing is leased any more. Idempotent."""
        ...


@dataclass(kw_only=True, eq=False)
class _Block:
    """What this worker has of one epoch of one loader. Guarded by the lock of `CoordinatorLeases`.
    Each batch is in one of four places."""

    loader: str
    epoch: int
    batches_in_epoch: int
    first_key: int = 0
    leased: deque[int] = field(default_factory=deque)
    """Batches that are leased and not handed to the loader yet."""
    out: list[int] = field(default_factory=list)
    """Batches that the loader has and that are not finished; the first one is at hand."""
    finished: list[int] = field(default_factory=list)
    """Batches whose pushes were acknowledged, which the coordinator has not heard of yet."""
    returned: list[int] = field(default_factory=list)
    """Batches that go back untrained, which the coordinator has not heard of yet."""
    loop_left: bool = False
    """The loader's loop takes no batches now, so that none is leased ahead."""
    wanted: int = 0
    """How many batches the training thread waits for; 0: it does not wait."""
    asking: bool = False
    """A request about this block is on its way."""
    unsaid_since: float = 0.0
    """When the first of those was finished that are not acknowledged; and `finished_at`: when the
    last one was, or it all began."""
    finished_at: float = 0.0
    pace_s: float = 0.0
    """Seconds from one finished batch to the next, averaged; 0: not known."""
    asks_below: int = 1
    """With fewer batches leased ahead the coordinator is asked for more: half of what there was
    after its last answer. 0: it has none, and is not asked before another batch is finished, unless
    the training thread waits."""
    answer: pb.LeaseBatchesResponse | None = None
    """The coordinator's last answer."""
    failure: Exception | None = None
    """What the coordinator refused a request with; the training thread is to raise it."""

    @property
    def is_settled(self) -> bool:
        """The coordinator knows all that it is to know."""
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
    """Leases of the coordinator's. The training thread takes and finishes batches; a thread of its
    own speaks to the coordinator, one numbered request after the other, each said again until it is
    answered: so none is lost with an answer."""

    def __init__(self, job: Job, *, ahead: timedelta) -> None:
        """`ahead`: how much work to have, going by the pace so far."""
        self._job = job
        self._ahead_s = ahead.total_seconds()
        self._blocks: dict[str, _Block] = {}
        """The newest of each loader: another one only when this is settled."""
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._numbered = 0
        """Number of the last request; the thread's own."""
        self._trouble = ""
        """Why the coordinator has not answered yet."""

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
        """See `LeaseSource`.

        Raises:
            StopTraining: this worker has nothing left to do, and is to leave; or has left.
            DeadlineError: the coordinator was away for too long.
            ShoalError: what it refuses.
        """
        with self._changed:
            block = self._block(loader, epoch, batches_in_epoch)
            _finish(block, finished)
            if want == 0:
                self._leave(block, at_hand)
                return _NOTHING
            if block.loop_left:
                # what was done in between is no step
                block.loop_left, block.finished_at = False, time.monotonic()
            if block.failure is not None:
                raise _taken(block)
            if not block.leased:
                if block.out:  # enough for this step
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
            self._changed.notify_all()  # there may be less than half left
            done = answer is not None and answer.epoch_done
            return Leases(
                batches=given,
                epoch_done=done,
                retry_after_s=0.0 if answer is None else answer.retry_after_ms / 1000,
            )

    def at_hand(self, loader: str) -> int:
        """See `LeaseSource`."""
        with self._changed:
            block = self._blocks.get(loader)
            return 0 if block is None or not block.out else block.first_key + block.out[0]

    def newest_epoch(self, loader: str, epoch: int) -> int:
        """See `LeaseSource`. Raises DeadlineError, and StopTraining when this worker is to
        leave."""
        answer = self._job.insist(
            "the coordinator",
            lambda: self._job.lease_batches(loader=loader, epoch=epoch, batches_in_epoch=0, want=0),
        )
        return max(epoch, answer.newest_epoch)

    def is_idle(self, loader: str) -> bool:
        """See `LeaseSource`."""
        with self._changed:
            block = self._blocks[loader]
            return not block.out and not block.leased

    def close(self) -> None:
        """See `LeaseSource`. What is leased or not acknowledged is dealt again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread, self._thread = self._thread, None  # whoever closes it again does not wait again
        if thread is not None:
            thread.join(_LAST_WORD_S)

    # ----------------------------------------------------------- the training thread, with the lock

    def _block(self, loader: str, epoch: int, batches_in_epoch: int) -> _Block:
        block = self._blocks.get(loader)
        if block is not None and block.epoch == epoch:
            return block
        if block is not None:
            # with a batch that was handed out, and could still be finished until now
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
        """Gives back all but `at_hand`. From here on they are not this worker's, whenever the
        coordinator hears of it."""
        block.loop_left = True
        block.returned += [batch for batch in (*block.out, *block.leased) if batch != at_hand]
        block.out = [batch for batch in block.out if batch == at_hand]
        block.leased.clear()
        if not block.is_settled:
            self._await(block, lambda: block.is_settled, for_batches=False)

    def _await(self, block: _Block, done: Callable[[], bool], *, for_batches: bool) -> None:
        """Returns when the thread has done what is asked of it. Raises as `lease`."""
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
                    f"waited {now - begun:.0f} s for the coordinator to hear of batches of loader "
                    f"{block.loader!r}{f': {self._trouble}' if self._trouble else ''}; see that it "
                    "runs, or start it again with its Redis"
                )
            self._changed.wait(_LOOK_S)

    # ----------------------------------------------------------------------------------- the thread

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
        """The next request, if one is due."""
        now = time.monotonic()
        for block in self._blocks.values():
            if block.failure is not None and not block.wanted:
                continue  # until the training thread asks
            enough = self._enough(block)
            if (
                block.leased
                and self._ahead_s
                and now - block.finished_at > _STANDS_STILL * self._ahead_s
            ):
                # It evaluates within its loop, say: the others need not wait for what it has leased
                # ahead.
                block.returned += block.leased
                block.leased.clear()
                block.asks_below = 0
            if enough and len(block.leased) > 2 * enough + _SPARED and not block.loop_left:
                # This worker has become slower: the others have more of it.
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
        """None: this object was closed meanwhile."""
        block = request.block
        backoff = Backoff(longest_s=_LONGEST_BACKOFF_S)
        told = False
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
                if not told:
                    _log.warning(
                        "the coordinator leases no batches now, %d are left: %s",
                        len(block.leased),
                        error,
                    )
                    told = True
                wait_s = backoff.next_s(error)
            except Exception as error:  # whatever it is, the training thread is to raise it
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
        # Where the loop was left meanwhile, nobody takes them.
        (block.returned if block.loop_left else block.leased).extend(answer.batches)
        if answer.batches and (block.wanted or request.waited_for):
            # it did not stand still, but waited for these; nor is the wait part of a step
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
            continue  # said again, since the answer to the first time was an error
        block.out.remove(batch)
        if not block.finished:
            block.unsaid_since = now
        block.finished.append(batch)
        block.asks_below = max(1, block.asks_below)
        taken_s = now - block.finished_at
        block.pace_s = taken_s if not block.pace_s else block.pace_s + (taken_s - block.pace_s) / 4
        block.finished_at = now


class LocalLeases:
    """Leases in a world of one, where nobody else asks: the batches of an epoch in their order."""

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
        """See `LeaseSource`."""
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
