"""This worker's job, as asynchronous training needs it: who it is there, in which generation, and where the parameter servers are.

Any thread may call; the coordinator's link and client are safe to share.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

from shoal_common.errors import ConfigurationError, DeadlineError, PreconditionError, ShoalError, UnavailableError
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_worker.elastic.generation import Peer
from shoal_worker.elastic.link import CoordinatorLink

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
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
        backoff = _FIRST_BACKOFF_S
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
            time.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, so that workers do not come back all at once
            backoff = min(2 * backoff, _LONGEST_BACKOFF_S)

    def _raise_if_over(self, error: ShoalError) -> None:
        if error.reason == "CLIENT_CLOSED":
            raise error
