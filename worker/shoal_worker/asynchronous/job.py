"""This worker's job, as asynchronous training needs it: who it is there, in which generation, and where the parameter servers are.

Any thread may call; the coordinator's link and client are safe to share.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

from shoal_common.backoff import Backoff
from shoal_common.errors import ConfigurationError, CorruptDataError, DeadlineError, PreconditionError, ShoalError, UnavailableError
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.wire import checksum
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_worker.elastic.generation import Peer
from shoal_worker.elastic.link import CoordinatorLink
from shoal_worker.elastic.loader_interface import Leases
from shoal_worker.elastic.transfer import StateDonor, take_state

_log = logging.getLogger(__name__)

_LONGEST_BACKOFF_S = 1.0

AnswerT = TypeVar("AnswerT")


class Job:
    """A member's view of its job."""

    def __init__(self, link: CoordinatorLink, channel: ChannelSettings, *, patience: timedelta, straggler_patience: timedelta) -> None:
        """`channel`: how services are spoken to (token, TLS); its address is not used. `patience`: longest wait for the coordinator, for
        servers to register, and for a rank while too few workers are left."""
        self._link = link
        self._channel = channel
        self._patience = patience
        self.straggler_patience = straggler_patience
        """After so long behind a slower worker the coordinator is told, in case that one is stuck."""
        self._entered = 0
        self.job_id = link.identity.job_id
        self.member_id = link.identity.member_id

    @property
    def generation(self) -> int:
        """Number of the newest generation known."""
        return self._link.newest

    @property
    def rank(self) -> int:
        """This worker's rank in it."""
        newest = self._link.newest_generation
        return newest.rank if newest is not None else 0

    def peers_before(self) -> list[Peer]:
        """Those in the newest generation that were in one before and have a donor, by rank."""
        newest = self._link.newest_generation
        peers = newest.peers if newest is not None else ()
        return [p for p in peers if not p.joining and p.member_id != self.member_id and p.donor_address and p.donor_key]

    def entered(self) -> None:
        """Changes of membership do not interrupt asynchronous training: this worker is in the newest generation at once, and says so."""
        if self.generation != self._entered:
            self._entered = self.generation
            self._link.entered(self._entered)

    def wait_for_rank(self, *, after: int) -> None:
        """Blocks until a generation above `after` has this member: the job was on hold because too few workers were left.

        Raises:
            StopTraining: the job was stopped, or this member is to leave.
            DeadlineError: no such generation came in time.
            ShoalError: this member was put out.
        """
        self._link.wait_generation(after=after, timeout=self._patience)

    @property
    def leaving(self) -> bool:
        """The job is to stop, or this member to leave, at the next border."""
        return self._link.stopped is not None or self._link.draining is not None

    def accuse_slowest(self, detail: str) -> None:
        """Tells the coordinator that a peer holds this member up, so that it puts out who makes no progress at all."""
        self._link.failed(self._link.newest, detail=detail, timed_out=True)

    def declare(self, tensors: Sequence[pb.TensorSpec]) -> pb.ShardMap:
        """Lays the tensors out over the job's parameter servers; waits until all of these are registered.

        Raises:
            ConfigurationError: the job has no parameter servers.
            PreconditionError: other workers have declared other tensors.
            DeadlineError: the servers did not come in time.
        """
        try:
            answer = self.insist("the job's parameter servers", lambda: self._link.client.declare_tensors(self.job_id, tensors))
        except PreconditionError as error:
            if error.reason == "JOB_WITHOUT_SERVERS":
                raise ConfigurationError(
                    f'strategy="async_sgd" needs parameter servers, and job {self.job_id!r} was created without; start it with '
                    "`shoal run --servers 2 ...`"
                ) from error
            raise
        return answer.shard_map

    def server_address(self, index: int) -> str | None:
        """Where a server listens now; None while the coordinator cannot say."""
        try:
            servers = self._link.client.get_shard_map(self.job_id).shard_map.servers
        except (UnavailableError, DeadlineError):
            return None
        return next((server.address for server in servers if server.server_index == index and server.address), None)

    def lease_batches(
        self, *, loader: str, epoch: int, batches_in_epoch: int, want: int, finished: Sequence[int], sequence: int
    ) -> pb.LeaseBatchesResponse:
        """Leases batches and acknowledges finished ones. Said again with the same `sequence` until the coordinator has answered.

        Raises:
            DeadlineError: it did not in time.
            ShoalError: it refused.
        """
        return self.insist(
            "the coordinator to lease batches",
            lambda: self._link.client.lease_batches(
                self.job_id,
                self.member_id,
                loader=loader,
                epoch=epoch,
                batches_in_epoch=batches_in_epoch,
                want=want,
                finished=finished,
                sequence=sequence,
            ),
        )

    def epoch_of_others(self) -> int:
        """The furthest epoch that another member has told the coordinator; 0: none has."""
        members = self.insist("the coordinator", lambda: self._link.client.get_job(self.job_id)).members
        return max((member.progress.epoch for member in members if member.member_id != self.member_id), default=0)

    def server_channel(self, address: str) -> ChannelSettings:
        """How to speak to a server."""
        # A push that fails is sent again by ServerLink, which first asks what became of it; gRPC's own retries would only hide that.
        return replace(self._channel, address=address, attempts=1)

    def insist(self, what: str, call: Callable[[], AnswerT]) -> AnswerT:
        """Repeats an idempotent call while its service cannot be reached. Raises DeadlineError after the job's patience."""
        deadline = time.monotonic() + self._patience.total_seconds()
        backoff = Backoff(longest_s=_LONGEST_BACKOFF_S)
        told = False
        while True:
            try:
                return call()
            except (UnavailableError, DeadlineError) as error:
                self._raise_if_over(error)
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"waited {self._patience.total_seconds():.0f} s for {what}: {error}", reason=error.reason
                    ) from error
                if not told:
                    _log.info("waiting for %s: %s", what, error)
                    told = True
            time.sleep(backoff.next_s())

    def _raise_if_over(self, error: ShoalError) -> None:
        if error.reason == "CLIENT_CLOSED":
            raise error


# --------------------------------------------------------------------------------------------------------------------------------- leases
#
# Where the batches of leased loaders come from: the coordinator, who deals a dead worker's again, or this process when it is alone.
#
# Used by the training thread.


class LeaseSource(Protocol):
    """Gives out the batches of each loader's epochs, each to one worker."""

    def lease(self, *, loader: str, epoch: int, batches_in_epoch: int, finished: Sequence[int], want: int) -> Leases:
        """See `LoaderSession.lease_batches`. Loaders take batches in the order in which they were leased, one at a time, and say `finished`
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
        """The batches that this worker holds a lease on, by the loader's name."""

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


_REST: Final = 50
"""Copying may take one part of so many of the training thread's time: a scheduler's state is copied at nearly every border, a large one (an
average of the parameters, say) now and then."""
_PATIENCE: Final = timedelta(seconds=5)
"""How long a joiner waits for one peer's state. A peer's offer is open already, unless it has not come to its first step."""


# ------------------------------------------------------------------------------------------------------ a worker's own state, for joiners
#
# A worker's own state for joiners: what the user registered, and the optimizer's settings with the place in their schedule.
#
# In synchronous training the state travels at borders, while all stand still. Here nobody does, and with ssp a member may be waiting for
# the very joiner that asks. So each worker keeps an offer open, a copy made at one of its last borders, and its donor's threads serve
# that whatever the training thread does (elastic/transfer.py). The name of an offer is its giver's key, which the coordinator tells
# members alone.
#
# `refresh`, `take` and `close` belong to the training thread.


class Handover:
    """This worker's offer, and what it takes of others'."""

    def __init__(self, donor: StateDonor, job: Job, capture: Callable[[], dict[str, Any]]) -> None:
        """`capture` gives this worker's state; it may share memory with it."""
        self._donor = donor
        self._job = job
        self._capture = capture
        self._offer = contextlib.ExitStack()
        self._due_at = 0.0

    def refresh(self) -> None:
        """At a border: what is offered must not grow too old."""
        begun = time.monotonic()
        if begun < self._due_at:
            return
        state = copy.deepcopy(self._capture())
        self._offer.close()
        self._offer.enter_context(self._donor.offering(state, self._donor.key))
        ended = time.monotonic()
        self._due_at = ended + _REST * (ended - begun)

    def take(self) -> dict[str, Any] | None:
        """A peer's state; None: none of them has any to give, or it could not be had."""
        for peer in self._job.peers_before():
            try:
                state, _ = take_state([peer.donor_address], peer.donor_key, timeout=_PATIENCE)
            except (UnavailableError, CorruptDataError) as error:
                _log.info("member %s gave no state: %s", peer.member_id, error)
            else:
                taken: dict[str, Any] = state
                return taken
        return None

    def close(self) -> None:
        """Takes the offer back. Idempotent."""
        self._offer.close()
