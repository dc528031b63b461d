"""This worker's view of its job for asynchronous training: its identity and generation, and the
addresses of the parameter servers.

All methods may be called from any thread.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

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

from shoal_worker.elastic.contract.generation import Peer
from shoal_worker.elastic.contract.loader_interface import Drained, StopTraining
from shoal_worker.elastic.coordinator.link import CoordinatorLink
from shoal_worker.elastic.group.waiting import WaitingLines
from shoal_worker.parameter_servers.coordination.server_waits import ServerWaits

_log = logging.getLogger(__name__)

_LONGEST_BACKOFF_S = 1.0

AnswerT = TypeVar("AnswerT")


class Job:
    """An asynchronous worker's access to its job: membership, leases, and the addresses of the
    parameter servers."""

    def __init__(
        self,
        link: CoordinatorLink,
        channel: ChannelSettings,
        *,
        patience: timedelta,
        straggler_patience: timedelta,
        transport: Transport = Transport.AUTO,
        fell_back: Callable[[Transport], None] = lambda transport: None,
        interceptors: Sequence[Any] = (),
    ) -> None:
        """`channel`: connection settings for services (token, TLS), without an address. `patience`:
        maximum time to wait for the coordinator, for servers to register, and for a rank while
        there are too few workers. `transport`, `fell_back`, `interceptors`: see
        `ParameterServerClient`.
        """
        self._link = link
        self._channel = channel
        self.patience = patience
        self.straggler_patience = straggler_patience
        """Time that this worker waits for a slower worker before it reports this to the
        coordinator, because the slower worker may be stuck."""
        self._transport = transport
        self._fell_back = fell_back
        self._interceptors = interceptors
        self._entered = 0
        self._takeovers = TakeoverWatch(self.shard_map)
        self.waits = ServerWaits()
        self.job_id = link.identity.job_id
        self.member_id = link.identity.member_id

    @property
    def generation(self) -> int:
        """Number of the newest generation known to this worker."""
        return self._link.newest

    @property
    def rank(self) -> int:
        """This worker's rank in the newest generation."""
        newest = self._link.newest_generation
        return newest.rank if newest is not None else 0

    @property
    def world_size(self) -> int:
        """Number of ranks in the newest generation; 1 before the first generation."""
        newest = self._link.newest_generation
        return newest.world_size if newest is not None else 1

    def peers_before(self) -> list[Peer]:
        """Returns the other peers of the newest generation, in rank order, if they were in an
        earlier generation too and can send their state (have a donor address and key)."""
        peers = self._peers_at(slice(None))
        return [
            p
            for p in peers
            if not p.joining and p.member_id != self.member_id and p.donor_address and p.donor_key
        ]

    def first_peer(self) -> Peer | None:
        """Returns rank 0 of the newest generation. Returns None if rank 0 is this worker, cannot
        send its state, or is unknown."""
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
            _log.info("could not find a peer that can send its state: %s", error)
            return ()

    def entered(self) -> bool:
        """Records that this worker has entered the newest generation. Returns whether the
        generation has changed since the last call. The caller decides when to call this, because
        membership changes do not interrupt asynchronous training."""
        if self.generation == self._entered:
            return False
        self._entered = self.generation
        self._link.entered(self._entered)
        return True

    def wait_for_rank(self, *, after: int) -> None:
        """Blocks until a generation with a number above `after` includes this member. Used when the
        job is on hold because it has too few workers.

        Raises:
            StopTraining: the job was stopped, or this member should leave.
            DeadlineError: no such generation formed in time.
            ShoalError: this member was removed.
        """
        self._link.wait_generation(after=after, timeout=self.patience)

    @property
    def leaving(self) -> bool:
        """True if this worker must stop at the next step boundary, because the job is stopping or
        the worker has been asked to leave."""
        return self._link.stopped is not None or self._link.draining is not None

    def departure(self) -> StopTraining:
        """Returns the exception that ends this worker's training. Must be called only when
        `leaving` is True."""
        stopped = self._link.stopped
        return StopTraining(stopped) if stopped is not None else Drained(self._link.draining or "")

    def accuse_slowest(self, detail: str) -> None:
        """Reports to the coordinator that this member is blocked by a slower peer. The coordinator
        then evicts any member that makes no progress."""
        self._link.failed(self._link.newest, detail=detail, timed_out=True)

    def declare(self, tensors: Sequence[pb.TensorSpec]) -> pb.ShardMap:
        """Declares the tensors to the coordinator, so that it assigns them to parameter servers.
        Blocks until all servers are registered, and returns the assignment.

        Raises:
            ConfigurationError: the job has no parameter servers.
            PreconditionError: other workers have declared different tensors.
            DeadlineError: the servers did not register in time.
        """
        try:
            answer = self.retry_until(
                "the job's parameter servers",
                lambda: self._link.client.declare_tensors(self.job_id, tensors),
            )
        except PreconditionError as error:
            if error.reason == "JOB_WITHOUT_SERVERS":
                raise ConfigurationError(
                    'strategy="async_sgd" and sparse tables need parameter servers, but job '
                    f"{self.job_id!r} was created without any; start it with `shoal run --servers "
                    "2 ...`"
                ) from None
            raise
        return answer.shard_map

    def shard_map(self) -> pb.ShardMap | None:
        """Returns each server's current partitions and address; None if the coordinator is
        unreachable."""
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
        """Leases batches, acknowledges finished batches and returns other batches to the
        coordinator, in one attempt. Raises the errors that the coordinator reports, and
        UnavailableError or DeadlineError if the coordinator is unreachable."""
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
        """Returns the connection settings for the server at `address`."""
        # ServerLink resends a failed push after asking for its outcome. gRPC's own retries would
        # only hide the failure.
        return replace(self._channel, address=address, attempts=1)

    def server_client(self, address: str) -> ParameterServerClient:
        """Returns a client for the server at `address` that identifies itself as this worker. The
        client is closed once the server has been replaced by a new one and no longer responds."""
        channel = self.server_channel(address)
        client = ParameterServerClient(
            channel,
            interceptors=self._interceptors,
            transport=self._transport,
            member_id=self.member_id,
            fell_back=self._fell_back,
        )
        self._takeovers.add(client)
        return client

    def retry_until(self, what: str, call: Callable[[], AnswerT]) -> AnswerT:
        """Calls `call`, which must be idempotent, until the service is reachable or `patience` has
        passed. `what`: name of the service, for errors."""
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
                if self.rank == 0:  # a single log line for all ranks
                    lines.say(what, functools.partial(str, error))
                wait_s = backoff.next_s(error)
            time.sleep(wait_s)

    def _raise_if_over(self, error: ShoalError) -> None:
        if error.reason == "CLIENT_CLOSED":
            raise error
