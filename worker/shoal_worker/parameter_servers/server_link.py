"""One worker's link to one parameter server: exactly-once pushes, pulls, and recovery after the
server was unreachable.

A push carries a sequence number per partition. If the call fails, its outcome is unknown, so the
link asks the server for its state and then sends the same numbers again: the server acknowledges
pushes that it has already applied, without applying them twice. If a restarted server lacks changes
that it had acknowledged, it has lost its disk or has no data directory. Updates of all workers are
then lost; the link reports this in the log and the metrics, initializes an empty server with this
worker's own values, and continues from the server's state
(docs/explanation/parameter-servers.md#pushes-count-once).

Partitions may move to another server at any time
(docs/explanation/parameter-servers.md#moving-partitions). The link then raises ShardMapChanged,
`ParameterServers` reassigns the partitions, and unacknowledged pushes go to the new owner with the
same numbers.

May be used by only one thread at a time: the training thread passes work to a pool thread and
waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar

import torch
from shoal_common.errors import (
    DeadlineError,
    InternalError,
    PreconditionError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_common.failpoints import failpoint
from shoal_common.formats.wire import checksum
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_worker.parameter_servers.connection import Connection, Pulls
from shoal_worker.parameter_servers.coordination.job import Job
from shoal_worker.parameter_servers.ledger import Delivery, Ledger
from shoal_worker.parameter_servers.options import AsyncOptions, Revision, ServerOptimizer
from shoal_worker.parameter_servers.persistence import MOVING, NOT_MY_TURN, TRANSIENT, Persistence
from shoal_worker.parameter_servers.prefetch import Pulled
from shoal_worker.parameter_servers.pushed_rows import PushedRows
from shoal_worker.parameter_servers.tensors import (
    Iteration,
    Partition,
    Payload,
    Payloads,
    ServerShare,
)

_log = logging.getLogger(__name__)

_FIRST_VALUES_WAIT: Final = timedelta(seconds=1)
"""Interval between checks whether rank 0 has provided the initial values."""
_MOST_FINISHED: Final = 2048
"""Maximum number of finished batches that are remembered for a server that rarely receives a push.
It exceeds the number of batches that a worker may have leased, so batches dropped from the list are
certainly acknowledged."""
_LARGEST_CLOCK: Final = 2**63 - 1

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, kw_only=True)
class Position:
    """This worker's position in the run, as one server counts it."""

    clock: int
    """Position in the server's own count of this worker's iterations. `by_others`: the same
    position in the count of each other participating member, by member id."""
    by_others: Mapping[str, int]


class ServerLink:
    """This worker's link to one server and the partitions on that server."""

    def __init__(
        self,
        job: Job,
        share: ServerShare,
        optimizer: ServerOptimizer,
        options: AsyncOptions,
        *,
        ledger: Ledger,
        payloads: Payloads,
        closing: threading.Event,
        lost: Callable[[int], None],
    ) -> None:
        """Creates the link. `ledger`, `payloads`: shared by the links to all servers. `closing`:
        event that is set to end all waits. `lost`: called with the number of this worker's updates
        that the server had acknowledged and then lost, counting each partition separately."""
        self._ledger = ledger
        self._payloads = payloads
        self._job = job
        self._optimizer = optimizer
        self._options = options
        self.gave_values = False
        """True if the server was uninitialized and received this worker's values."""
        self._closing = closing
        self._lost = lost
        self._revision = Revision(number=0, groups=())
        """Newest revision of the hyperparameters that has been sent to this server."""
        self._clock = 0
        self._finished_batches: list[int] = []
        """Batches finished on all servers that have not been reported to this server yet."""
        self._server = Connection(job, share)
        self._pulls = Pulls(job, self._server, ledger, compression=options.pull_compression)
        self._persistence = Persistence(
            job,
            self._server,
            patience=options.server_timeout,
            closing=closing,
            started=lambda: self._started,
            resynchronize=self._resynchronize,
        )
        self._started = self._has_values()

    @property
    def index(self) -> int:
        """Index of the server (server_index)."""
        return self._server.share.index

    @property
    def address(self) -> str:
        """Address of the server."""
        return self._server.address

    def adopt(self, share: ServerShare) -> None:
        """Replaces the list of the server's partitions with the list in the newest shard map, which
        may include partitions that this worker has never pulled. Must not be called during another
        call.
        """
        self._server.adopt(share)
        self._started = self._has_values()

    def _has_values(self) -> bool:
        """Returns whether this worker has already pulled all values on the server."""
        return all(map(self._ledger.has_values, self._server.partitions))

    def joins(self, others: Sequence[ServerLink]) -> None:
        """Brings this link, which was created during training, up to date with the existing links
        `others`. Must not be called during another call."""
        self._clock = max(link._clock for link in others)
        self._finished_batches = max((list(link._finished_batches) for link in others), key=len)

    # ---------------------------------------------------------------------------------------- start

    def configure(self) -> None:
        """Sets the server's optimizer and consistency.

        Raises:
            PreconditionError (OPTIMIZER_CONFLICT): another worker has set a different optimizer or
                consistency.
            DeadlineError: the server was not reachable in time.
        """
        self._persistence.retry_until("ConfigureOptimizer", self._configure)

    def start(self, *, has_values: bool, joins_late: bool = False) -> None:
        """Initializes the server with rank 0's values if it is uninitialized, and pulls the
        server's values.

        Args:
            has_values: True if this worker can provide values.
            joins_late: True if the run had already begun. An uninitialized server may then have
                lost training progress, which is logged.

        Raises:
            PreconditionError: this worker is rank 0 and has no values.
            DeadlineError: the server is unreachable.
            StopTraining: the worker should leave before it has received any values.
        """
        deadline = time.monotonic() + self._options.server_timeout.total_seconds()
        while not self._started:
            if self._job.rank == 0:
                self._persistence.retry_until(
                    "Initialize",
                    lambda: self._initialize_missing(has_values=has_values, joins_late=joins_late),
                )
            try:
                self._persistence.retry_until("Pull", self._pull_first_values)
            except DeadlineError as error:
                # Rank 0 may have left. In the next round, the values are requested from the member
                # that then has this rank.
                if (
                    error.reason != "PARTITION_UNINITIALIZED"
                    or time.monotonic() > deadline
                    or self._closing.is_set()
                ):
                    raise
                if self._job.leaving:
                    raise self._job.departure() from error
            else:
                self._started = True
        if self._options.delay_compensation and not self._options.waits_for_others:
            # The first gradient is compensated against the values that this worker pulls under its
            # own id.
            self._persistence.retry_until(
                "Pull", lambda: self._pulls.pull(self._server.trained, clock=self._clock)
            )

    # --------------------------------------------------------------------------------- step by step

    def exchange(self, delivery: Delivery) -> None:
        """Pushes this server's gradients, except those that it has already acknowledged, and pulls
        newer values into the tensors' host memory.

        Raises:
            ShardMapChanged: partitions have moved.
            DeadlineError: the server was unreachable for too long; part of the iteration may have
                been applied.
            StopTraining: the job was on hold and was then stopped.
            ShoalError: the server rejected the push or the pull."""
        iteration = delivery.iteration
        if iteration.revision.number > self._revision.number:
            self._persistence.retry_until(
                "SetHyperparameters", lambda: self._set_hyperparameters(iteration.revision)
            )
        wanted: list[Partition | PushedRows] = [
            each
            for each in self._server.trained
            if any(piece.tensor.name in iteration.gradients for piece in each.pieces)
        ]
        wanted += [
            each for number, each in iteration.rows.items() if number in self._server.share.buckets
        ]
        pushed = [each for each in wanted if each.partition_id not in delivery.acknowledged]
        if pushed:
            self._prepare(pushed, delivery)
            answer = self._push_in_turn(
                lambda: self._push(
                    pushed, (delivery.payloads[each.partition_id]() for each in pushed), iteration
                )
            )
            applied = {
                each.partition_id for each in answer if not each.known_batch
            } - delivery.there
            self._payloads.settle((each.partition_id for each in answer), applied=applied)
            delivery.acknowledged.update({each.partition_id: each for each in answer})
        self._clock = iteration.clock
        if iteration.pull and self._server.trained:
            self.pull_in_turn(delivery.pulled)
        elif self._takes_part and not pushed:
            self.advance_clock(iteration.clock)

    def _prepare(self, pushed: Sequence[Partition | PushedRows], delivery: Delivery) -> None:
        """Creates the payloads for this iteration's push, after determining the outcome of
        abandoned pushes."""
        new = [each for each in pushed if each.partition_id not in delivery.payloads]
        batch = delivery.iteration.batch
        self._ledger.computed_on(
            {each.partition_id: each.version for each in new if isinstance(each, PushedRows)}
        )
        doubtful = {
            each.partition_id: doubt == batch
            for each in new
            if (doubt := self._ledger.doubt(each.partition_id)) is not None
        }
        if doubtful:
            delivery.there.update(
                self._persistence.retry_until("GetServer", lambda: self._look_back(doubtful))
            )
        self._ledger.begun((each.partition_id for each in new), batch)
        for each in new:
            delivery.payloads[each.partition_id] = (
                self._payloads.rows(each)
                if isinstance(each, PushedRows)
                else self._payloads.gradient(each, delivery.iteration)
            )

    def _push_in_turn(self, push: Callable[[], AnswerT]) -> AnswerT:
        """Runs a push. Under bsp, waits until all workers have read the values that the push
        changes. If this worker is asked to leave meanwhile, it stops waiting and leaves, because
        its batch will be assigned to another worker."""
        try:
            return self._persistence.in_turn("Push", push)
        except DeadlineError as error:
            if error.reason in NOT_MY_TURN and self._job.leaving:
                raise self._job.departure() from error
            raise

    def finished(self, batch: int) -> None:
        """Records that all servers have acknowledged all pushes of the batch with key `batch`."""
        self._finished_batches.append(batch)
        del self._finished_batches[:-_MOST_FINISHED]

    def pull_in_turn(self, pulled: set[int]) -> None:
        """Pulls as soon as this worker may begin its next iteration; under asp, immediately.
        `pulled`: partitions already pulled for that iteration, possibly from another server before
        they moved. They are skipped, and the partitions pulled here are added to the set."""
        if not self._server.trained:
            return
        missing = [each for each in self._server.trained if each.partition_id not in pulled]
        if missing:
            try:
                self._persistence.in_turn(
                    "Pull", lambda: self._pulls.pull(missing, clock=self._clock)
                )
            except DeadlineError as error:
                if error.reason not in NOT_MY_TURN:
                    raise
                return  # the worker leaves at the next step boundary, so it needs no newer values
            pulled.update(each.partition_id for each in missing)
        elif not self._options.in_step:
            self.advance_clock(self._clock)
        if self._options.in_step:
            self._send_clock(self._clock, has_read=True)

    def pull(self) -> None:
        """Pulls newer values outside of a step, without waiting for other workers."""
        # If the pull would have to wait for its turn, the worker pulls as an observer; a gradient
        # computed on these values is then not compensated.
        in_turn = bool(self._options.delay_compensation) and not self._options.waits_for_others
        self._persistence.retry_until(
            "Pull",
            lambda: self._pulls.pull(self._server.trained, clock=self._clock if in_turn else None),
        )

    def pull_ahead(self, memory: dict[str, torch.Tensor]) -> Pulled:
        """Implements `prefetch.Source`."""
        return self._persistence.retry_until(
            "Pull", lambda: self._pulls.pull_ahead(self._server.trained, memory, clock=self._clock)
        )

    def read(self, into: Mapping[str, torch.Tensor]) -> None:
        """Reads all values into separate flat host tensors (name -> tensor). The values that
        training uses remain unchanged."""
        self._persistence.retry_until("Pull", lambda: self._pulls.read(into))

    # --------------------------------------------------------------------------------------- clocks

    def advance_clock(self, clock: int) -> None:
        """Reports that this worker has finished `clock` iterations."""
        self._clock = clock
        self._send_clock(clock)

    def enter(self, clock: int) -> Position | None:
        """Makes this worker participate: from now on, other workers may have to wait for it.
        `clock`: number of iterations that it has finished. Returns the worker's position; None if
        this server has neither trained tensors nor buckets of sparse tables."""
        self._clock = clock
        if not self._takes_part:
            return None
        self.advance_clock(clock)
        state = self._persistence.retry_until(
            "GetServer", lambda: self._server.client.get_server(member_id=self._job.member_id)
        )
        own = state.clocks.get(self._job.member_id, 0)
        others = {
            member: own - (state.clocks[member] - done)
            for member, done in state.iterations.items()
            if member != self._job.member_id
        }
        return Position(clock=own, by_others=others)

    def place(self, at: int | None) -> None:
        """Moves this worker to position `at`, in the server's count of iterations. `at` must not be
        lower than the current position; None: no change."""
        if at is not None:
            self._send_clock(self._clock, place=at)

    def rest(self) -> None:
        """Reports to the server that no worker needs to wait for this worker until it calls `enter`
        again."""
        if self._takes_part:
            self._send_clock(_LARGEST_CLOCK)

    @property
    def _takes_part(self) -> bool:
        """True if this server has trained tensors or buckets of sparse tables."""
        return bool(self._server.trained or self._server.share.buckets)

    def _send_clock(self, clock: int, *, has_read: bool = False, place: int = 0) -> None:
        def send() -> None:
            self._server.client.advance_clock(
                self._job.job_id,
                self._job.member_id,
                clock=clock,
                has_read=has_read,
                place=place,
                generation=self._job.generation,
                shard_map_epoch=self._server.share.epoch,
            )

        self._persistence.retry_until("AdvanceClock", send)

    # ------------------------------------------------------------------------------------- shutdown

    def snapshot(self) -> str:
        """Makes the server write its snapshot and returns the snapshot's path. Raises the errors
        listed for Snapshot in the .proto file. May be called from any thread."""
        return self._server.client.snapshot(self._job.job_id).path

    def leave(self, patience: timedelta) -> None:
        """Reports to the server that no worker needs to wait for this worker any more. If the
        server is unreachable, it will learn this from the coordinator."""
        try:
            self._server.client.advance_clock(
                self._job.job_id, self._job.member_id, clock=_LARGEST_CLOCK, deadline=patience
            )
        except (*TRANSIENT, UnknownResourceError) as error:
            _log.debug(
                "parameter server %d did not receive this worker's leave message: %s",
                self.index,
                error,
            )

    def close(self) -> None:
        """Cancels calls in progress. Idempotent. May be called from any thread."""
        self._server.close()

    # ------------------------------------------------------------------------------ single attempts

    def _configure(self) -> None:
        self._server.client.configure_optimizer(
            self._job.job_id, self._optimizer.spec, self._options.message()
        )

    def _set_hyperparameters(self, revision: Revision) -> None:
        hyperparameters, groups = self._optimizer.change(revision)
        self._server.client.set_hyperparameters(
            self._job.job_id,
            revision=revision.number,
            hyperparameters=hyperparameters,
            groups=groups,
        )
        self._revision = revision

    def _initialize_missing(self, *, has_values: bool, joins_late: bool) -> None:
        versions = {
            each.partition_id: each.version for each in self._server.client.get_server().partitions
        }
        missing = [
            each for each in self._server.partitions.values() if not versions.get(each.partition_id)
        ]
        if missing and not has_values:
            raise PreconditionError(
                "rank 0's parameters are on the meta device, but all ranks start from its "
                "values; initialize them on rank 0",
                reason="VALUES_MISSING",
            )
        results = self._initialize(missing)
        self.gave_values |= not all(each.duplicate for each in results)
        if joins_late and not all(each.duplicate for each in results):
            _log.warning(
                "the run had already begun, but parameter server %d had no values for %d of its "
                "%d partitions and received those of this new worker. If the run had trained, "
                "its progress in these partitions is LOST. Stop the run and restore the server's "
                "data directory, or begin a new run",
                self.index,
                len(missing),
                len(self._server.partitions),
            )

    def _pull_first_values(self) -> None:
        partitions = list(self._server.partitions.values())
        self._pulls.pull(partitions, clock=None, wait=_FIRST_VALUES_WAIT, codec=pb.CODEC_RAW)

    def _initialize(self, partitions: Sequence[Partition]) -> list[pb.PartitionResult]:
        if not partitions:
            return []
        return self._server.client.initialize(
            self._outgoing(self._payloads.values(partitions)),
            deadline=self._server.stream_deadline(),
        )

    def _push(
        self,
        partitions: Sequence[Partition | PushedRows],
        payloads: Iterable[Payload],
        iteration: Iteration,
    ) -> list[pb.PartitionResult]:
        finished = tuple(self._finished_batches)
        outgoing = self._outgoing(
            payloads, clock=iteration.clock, batch=iteration.batch, finished=finished
        )
        rows_bytes = sum(each.data.nbytes for each in partitions if isinstance(each, PushedRows))
        results = self._server.client.push(
            outgoing, deadline=self._server.stream_deadline(rows_bytes)
        )
        if [result.partition_id for result in results] != [
            partition.partition_id for partition in partitions
        ]:
            raise InternalError(
                f"parameter server {self.index} acknowledged other partitions than those that "
                "were pushed to it"
            )
        failpoint("exchange.server_answered")
        del self._finished_batches[: len(finished)]
        self._ledger.acknowledged(results)
        return results

    def _outgoing(
        self,
        payloads: Iterable[Payload],
        *,
        clock: int | None = None,
        batch: int = 0,
        finished: Sequence[int] = (),
    ) -> Iterator[tuple[pb.PushHeader, memoryview]]:
        """Yields headers and payloads, each created just before it is sent. `clock`: clock of a
        push; None: initial values. `finished`: finished batches to report with the first
        payload."""
        generation = self._job.generation
        for payload in payloads:
            partition = payload.partition
            header = pb.PushHeader(
                job_id=self._job.job_id,
                member_id=self._job.member_id,
                generation=generation,
                partition_id=partition.partition_id,
                shard_map_epoch=self._server.share.epoch,
                dtype=pb.Dtype.ValueType(partition.dtype.dtype),
                codec=pb.Codec.ValueType(payload.codec),
                length=payload.length,
                payload_bytes=payload.data.nbytes,
                checksum=checksum(payload.data),
                absent_pieces=payload.absent,
                rows=payload.rows,
            )
            if clock is not None:
                header.sequence, header.base_version = self._ledger.next_push(
                    partition.partition_id
                )
                header.clock = clock
                header.batch = batch
                header.finished_batches.extend(finished)
                finished = ()
            yield header, payload.data

    # --------------------------------------------------------------------------- the server's state

    def _resynchronize(self) -> None:
        """Finds the server, determines its state, and restores what a restarted server lacks:
        optimizer, hyperparameters and, if it is empty, values. Raises the errors of these calls,
        and UnavailableError (PARTITION_MOVING) if a partition is moving: part of a push would then
        be sent in vain."""
        self._server.find()
        state = self._server.look()
        if moving := [each.partition_id for each in state.partitions if each.moving]:
            raise UnavailableError(
                f"partitions {moving} of parameter server {self._server.share.index} are still "
                "moving to another server",
                reason=MOVING,
            )
        if not state.HasField("optimizer"):
            self._configure()
        if self._revision.number:
            self._set_hyperparameters(self._revision)
        if self._started:
            held = {each.partition_id for each in state.partitions if each.version}
            empty = [
                partition
                for partition in self._server.partitions.values()
                if partition.partition_id not in held
            ]
            if empty:
                # If the server has not been notified yet that it received these partitions from
                # another server, it now fetches them and keeps their values.
                if not all(each.duplicate for each in self._initialize(empty)):
                    _log.warning(
                        "parameter server %d restarted without values and received those of this "
                        "worker; its optimizer state is lost",
                        self.index,
                    )
                state = self._server.look()
            # If the server has not been notified yet that some of its partitions have moved, it
            # also reports its state of those.
            own = self._server.partitions.keys() | set(self._server.share.buckets)
            self._rewind(each for each in state.partitions if each.partition_id in own)

    def _look_back(self, doubtful: Mapping[int, bool]) -> frozenset[int]:
        """Determines the outcome of abandoned pushes. Returns the partitions where the abandoned
        push was applied and the next push repeats its batch: the server will mistake the next push
        for the abandoned one, and acknowledge it without applying it. All other partitions continue
        from the server's sequence numbers.

        `doubtful`: for each partition with an abandoned push, whether the next push has the same
        batch.
        """
        self._server.find()
        held = [each for each in self._server.look().partitions if each.partition_id in doubtful]
        if len(held) < len(doubtful):
            raise UnavailableError(
                f"parameter server {self.index} does not know yet that it owns partitions "
                f"{sorted(doubtful)}"
            )
        there = self._ledger.ahead(held)
        self._payloads.settle(doubtful, applied=there)
        self._ledger.follow(each for each in held if not doubtful[each.partition_id])
        return frozenset(partition_id for partition_id in there if doubtful[partition_id])

    def _rewind(self, state: Iterable[pb.PartitionVersion]) -> None:
        """Continues from the server's state. Logs and reports any updates that the server has
        lost."""
        lost = self._ledger.rewind(state)
        if lost:
            _log.warning(
                "parameter server %d restarted without %d updates of this worker that it had "
                "acknowledged (counted by partition), and without later updates of other "
                "workers; training continues from its values. A server with its own data "
                "directory loses no updates",
                self.index,
                lost,
            )
            self._lost(lost)
