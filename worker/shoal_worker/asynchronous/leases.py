"""Where the batches of leased loaders come from: the coordinator, who deals a dead worker's again, or this process when it is alone.

Used by the training thread.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal_common.wire import checksum
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_worker.asynchronous.job import Job
from shoal_worker.elastic.contract import Leases


class LeaseSource(Protocol):
    """Gives out the batches of each loader's epochs, each to one worker."""

    def lease(self, *, loader: str, epoch: int, batches_in_epoch: int, finished: Sequence[int], want: int) -> Leases:
        """See `StepClock.lease_batches`. Loaders take batches in the order in which they were leased, one at a time, and say `finished`
        before they take the next. `want` 0: the loop is left; beside those finished, what is still leased goes back."""
        ...

    def at_hand(self, loader: str) -> int:
        """Key of the batch of `loader` that is being worked on: the same in whichever member has it, and of no other batch of the job.
        0: it cannot come to another member."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Held:
    epoch: int
    batches_in_epoch: int
    batches: tuple[int, ...]
    """Leased and not acknowledged, in the order of leasing."""


class CoordinatorLeases:
    """The coordinator's. Requests are numbered, so that one whose answer was lost is answered alike when it is repeated."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._numbers: defaultdict[tuple[str, int], itertools.count[int]] = defaultdict(lambda: itertools.count(1))
        self._held: dict[str, _Held] = {}
        """By loader."""

    def lease(self, *, loader: str, epoch: int, batches_in_epoch: int, finished: Sequence[int], want: int) -> Leases:
        """See `LeaseSource`. Raises DeadlineError when the coordinator is away for too long, and what it refuses."""
        held = self._held.get(loader)
        if held is not None and held.epoch != epoch and held.batches:
            # Its loop was left with a batch that was handed out, and could still be finished until now.
            self._ask(loader, held.epoch, held.batches_in_epoch, (), 0)
        kept = [batch for batch in held.batches if batch not in finished] if held is not None and held.epoch == epoch and want else []
        answer = self._ask(loader, epoch, batches_in_epoch, finished, want)
        self._held[loader] = _Held(epoch=epoch, batches_in_epoch=batches_in_epoch, batches=(*kept, *answer.batches))
        return Leases(batches=tuple(answer.batches), epoch_done=answer.epoch_done, retry_after_s=answer.retry_after_ms / 1000)

    def at_hand(self, loader: str) -> int:
        """See `LeaseSource`."""
        held = self._held[loader]
        return checksum(f"{loader}\n{held.epoch}\n{held.batches[0]}".encode())

    def _ask(self, loader: str, epoch: int, batches_in_epoch: int, finished: Sequence[int], want: int) -> pb.LeaseBatchesResponse:
        return self._job.lease_batches(
            loader=loader,
            epoch=epoch,
            batches_in_epoch=batches_in_epoch,
            want=want,
            finished=finished,
            sequence=next(self._numbers[loader, epoch]),
        )


class LocalLeases:
    """For a world of one: batches in order."""

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
