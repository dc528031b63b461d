"""Where the batches of leased loaders come from: the coordinator, who deals a dead worker's again, or this process when it is alone.

Used by the training thread.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from shoal_common.wire import checksum

from shoal_worker.asynchronous.job import Job
from shoal_worker.elastic.contract import Leases


class LeaseSource(Protocol):
    """Gives out the batches of each loader's epochs, each to one worker."""

    def lease(self, *, loader: str, epoch: int, batches_in_epoch: int, finished: Sequence[int], want: int) -> Leases:
        """See `StepClock.lease_batches`. Loaders take batches in the order in which they were leased, one at a time, and say `finished`
        before they take the next."""
        ...

    def at_hand(self, loader: str) -> int:
        """Key of the batch of `loader` that is being worked on: the same in whichever member has it, and of no other batch of the job.
        0: it cannot come to another member."""
        ...


class CoordinatorLeases:
    """The coordinator's. Requests are numbered, so that one whose answer was lost is answered alike when it is repeated."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._numbers: defaultdict[tuple[str, int], itertools.count[int]] = defaultdict(lambda: itertools.count(1))
        self._held: dict[str, tuple[int, tuple[int, ...]]] = {}
        """Loader -> epoch, and its batches that are leased and not acknowledged, in the order of leasing."""

    def lease(self, *, loader: str, epoch: int, batches_in_epoch: int, finished: Sequence[int], want: int) -> Leases:
        """See `LeaseSource`. Raises DeadlineError when the coordinator is away for too long, and what it refuses."""
        answer = self._job.lease_batches(
            loader=loader,
            epoch=epoch,
            batches_in_epoch=batches_in_epoch,
            want=want,
            finished=finished,
            sequence=next(self._numbers[loader, epoch]),
        )
        held_epoch, held = self._held.get(loader, (epoch, ()))
        kept = tuple(batch for batch in held if batch not in finished) if held_epoch == epoch else ()
        self._held[loader] = epoch, (*kept, *answer.batches)
        return Leases(batches=tuple(answer.batches), epoch_done=answer.epoch_done, retry_after_s=answer.retry_after_ms / 1000)

    def at_hand(self, loader: str) -> int:
        """See `LeaseSource`."""
        epoch, held = self._held[loader]
        return checksum(f"{loader}\n{epoch}\n{held[0]}".encode())


class LocalLeases:
    """For a world of one: batches in order."""

    def __init__(self) -> None:
        self._dealt: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._open: defaultdict[tuple[str, int], set[int]] = defaultdict(set)

    def lease(self, *, loader: str, epoch: int, batches_in_epoch: int, finished: Sequence[int], want: int) -> Leases:
        """See `LeaseSource`."""
        key = (loader, epoch)
        first = self._dealt[key]
        batches = tuple(range(first, min(first + want, batches_in_epoch)))
        self._dealt[key] += len(batches)
        self._open[key] = (self._open[key] | set(batches)) - set(finished)
        done = self._dealt[key] == batches_in_epoch and not self._open[key]
        return Leases(batches=batches, epoch_done=done, retry_after_s=0.0)

    def at_hand(self, loader: str) -> int:
        """See `LeaseSource`: nobody else is there."""
        return 0
