"""This worker's job, as asynchronous training needs it: who it is there, in which generation, and
where the parameter servers are.

Any thread may call; the coordinator's link and client are safe to share.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

from shoal_common.backoff import Backoff
from shoal_common.bulk.transport import Transport
from shoal_common.clients.parameter_server import ParameterServerClient
from shoal_common.clients.takeover import TakeoverWatch
from shoal_common.errors import (
    ConfigurationError,
    DeadlineError,
    MembershipChanged,
    PreconditionError,
    ShoalError,
    UnavailableError,
)
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_worker.asynchronous.server_waits import ServerWaits
from shoal_worker.elastic.generation import Peer
from shoal_worker.elastic.link import CoordinatorLink
from shoal_worker.elastic.loader_interface import Drained, StopTraining
from shoal_worker.elastic.waiting import WaitingLines

_log = logging.getLogger(__name__)

_LONGEST_BACKOFF_S = 1.0

AnswerT = TypeVar("AnswerT")


class Job:
    """A member's view of its job."""

    def __init__(
        self,
        link: CoordinatorLink,
        channel: ChannelSettings,
        *,
        patience: timedelta,
        straggler_patience: timedelta,
        transport: Transport = Transport.AUTO,
        fell_back: Callable[[Transport], None] = lambda transport: None,
    ) -> None:
        """`channel`: how services are spoken to (token, TLS); its address is not used. `patience`:
        longest wait for the coordinator, for servers to register, and for a rank while too few
        workers are left. `transport`, `fell_back`: as `ParameterServerClient` takes them."""
        self._link = link
        self._channel = channel
        self.patience = patience
        self.straggler_patience = straggler_patience
        """After so long behind a slower worker the coordinator is told, in case that one is
        stuck."""
        self._transport = transport
        self._fell_back = fell_back
        self._entered = 0
        self._takeovers = TakeoverWatch(self.shard_map)
        self.waits = ServerWaits()
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

    @property
    def world_size(self) -> int:
        """Ranks of it; 1 before the first one."""
        newest = self._link.newest_generation
        return newest.world_size if newest is not None else 1

    def peers_before(self) -> list[Peer]:
        """Those in the newest generation that were in one before and have a donor, by rank."""
        peers = self._peers_at(slice(None))
        return [
            p
            for p in peers
            if not p.joining and p.member_id != self.member_id and p.donor_address and p.donor_key
        ]

    def first_peer(self) -> Peer | None:
        """Rank 0 of the newest generation; None: this worker is it, or it has no donor, or is not
        known."""
        others = [
            p
            for p in self._peers_at(slice(1))
            if p.member_id != self.member_id and p.donor_address and p.donor_key
        ]
        return others[0] if others else None

    def _peers_at(self, ranks: slice) -> Sequence[Peer]:
        newest = self._link.newest_generation
        try:
            return newest.peers[ranks] if newest is not None else ()
        except (MembershipChanged, UnavailableError) as error:
            _log.info("who has a state to give is not known: %s", error)
            return ()

    def entered(self) -> bool:
        """Changes of membership do not interrupt asynchronous training: this worker is in the
        newest generation at once, and says so. Returns whether that is another one than before."""
        if self.generation == self._entered:
            return False
        self._entered = self.generation
        self._link.entered(self._entered)
        return True

    def wait_for_rank(self, *, after: int) -> None:
        """Blocks until a generation above `after` has this member: the job was on hold because too
        few workers were left.

        Raises:
            StopTraining: the job was stopped, or this member is to leave.
            DeadlineError: no such generation came in time.
            ShoalError: this member was put out.
        """
        self._link.wait_generation(after=after, timeout=self.patience)

    @property
    def leaving(self) -> bool:
        """The job is to stop, or this member to leave, at the next border."""
        return self._link.stopped is not None or self._link.draining is not None

    def departure(self) -> StopTraining:
        """What ends this worker's training when it is `leaving`."""
        stopped = self._link.stopped
        return StopTraining(stopped) if stopped is not None else Drained(self._link.draining or "")

    def accuse_slowest(self, detail: str) -> None:
        """Tells the coordinator that a peer holds this member up, so that it puts out who makes no
        progress at all."""
        self._link.failed(self._link.newest, detail=detail, timed_out=True)

    def declare(self, tensors: Sequence[pb.TensorSpec]) -> pb.ShardMap:
        """Lays the tensors out over the job's parameter servers; waits until all of these are
        registered.

        Raises:
            ConfigurationError: the job has no parameter servers.
            PreconditionError: other workers have declared other tensors.
            DeadlineError: the servers did not come in time.
        """
        try:
            answer = self.insist(
                "the job's parameter servers",
                lambda: self._link.client.declare_tensors(self.job_id, tensors),
            )
        except PreconditionError as error:
            if error.reason == "JOB_WITHOUT_SERVERS":
                raise ConfigurationError(
                    'strategy="async_sgd" and sparse tables need parameter servers, and job '
                    f"{self.job_id!r} was created without; start "
                    "it with `shoal run --servers 2 ...`"
                ) from None
            raise
        return answer.shard_map

    def shard_map(self) -> pb.ShardMap | None:
        """Which server has which partitions, and where it listens, as of now; None while the
        coordinator cannot say."""
        try:
            return self._link.client.get_shard_map(self.job_id).shard_map
        except (UnavailableError, DeadlineError):
            return None

    def lease_batches(
        self,
        *,
        loader: str,
        epoch: int,
        batches_in_epoch: int,
        want: int,
        finished: Sequence[int] = (),
        returned: Sequence[int] = (),
        sequence: int = 0,
        batch_ms: int = 0,
    ) -> pb.LeaseBatchesResponse:
        """Leases batches, acknowledges finished ones and gives others back, once. Raises what the
        coordinator refuses, and UnavailableError or DeadlineError where it cannot be reached."""
        return self._link.client.lease_batches(
            self.job_id,
            self.member_id,
            loader=loader,
            epoch=epoch,
            batches_in_epoch=batches_in_epoch,
            want=want,
            finished=finished,
            sequence=sequence,
            keep=True,
            returned=returned,
            batch_ms=batch_ms,
        )

    def server_channel(self, address: str) -> ChannelSettings:
        """How to speak to a server."""
        # A push that fails is sent again by ServerLink, which first asks what became of it; gRPC's
        # own retries would only hide that.
        return replace(self._channel, address=address, attempts=1)

    def server_client(self, address: str) -> ParameterServerClient:
        """A client of the server at `address`, which speaks for this worker. It is closed when
        another server has taken the place of that one, which does not answer."""
        channel = self.server_channel(address)
        client = ParameterServerClient(
            channel, transport=self._transport, member_id=self.member_id, fell_back=self._fell_back
        )
        self._takeovers.add(client)
        return client

    def insist(self, what: str, call: Callable[[], AnswerT]) -> AnswerT:
        """Repeats an idempotent call while its service cannot be reached.

        Raises:
            DeadlineError: after the job's patience.
            StopTraining: this worker is to leave.
        """
        deadline = time.monotonic() + self.patience.total_seconds()
        backoff, lines = Backoff(longest_s=_LONGEST_BACKOFF_S), WaitingLines()
        while True:
            try:
                return call()
            except (UnavailableError, DeadlineError) as error:
                self._raise_if_over(error)
                if self.leaving:
                    raise self.departure() from error
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"waited {self.patience.total_seconds():.0f} s for {what}: {error}",
                        reason=error.reason,
                    ) from error
                if self.rank == 0:  # one log line for all ranks
                    lines.say(what, functools.partial(str, error))
                wait_s = backoff.next_s(error)
            time.sleep(wait_s)

    def _raise_if_over(self, error: ShoalError) -> None:
        if error.reason == "CLIENT_CLOSED":
            raise error
