"""All parameter servers of the job, as used by one worker. Each call is made to all servers in
parallel, and their responses are combined.

Each server has its own thread, so values are pulled from one server while values are still being
pushed to another. The training thread waits for all of these threads, so it never uses the tensors'
memory at the same time as they do. An error of one server is raised once the calls to all other
servers have finished.

When partitions have moved (docs/explanation/parameter-servers.md#moving-partitions), the training
thread reassigns them after all threads have returned and calls all servers again. Every call can be
repeated in this way, because each server applies it only once, or because it is idempotent.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Final, TypeVar

import torch
import xxhash
from shoal_common.errors import ShoalError
from shoal_protos.v1 import coordinator_pb2 as coordinator_pb

from shoal_worker.compression.base import GradientCompressor
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.parameter_servers.background import wait_for_all
from shoal_worker.parameter_servers.coordination.job import Job
from shoal_worker.parameter_servers.ledger import Delivery, Ledger, Pushed, ShardMapChanged
from shoal_worker.parameter_servers.options import AsyncOptions, ServerOptimizer
from shoal_worker.parameter_servers.prefetch import Prefetch
from shoal_worker.parameter_servers.server_link import Position, ServerLink
from shoal_worker.parameter_servers.tensors import (
    HostTensor,
    Iteration,
    Payloads,
    ServerShare,
    publish,
    shares,
)

_log = logging.getLogger(__name__)

_LEAVE_PATIENCE: Final = timedelta(seconds=2)
_MOST_SERVERS: Final = 1000
"""Maximum number of servers in a job, and therefore of threads. A thread is started when a server
is called and no thread is idle."""

AnswerT = TypeVar("AnswerT")


class ParameterServers:
    """Client of all parameter servers of the job. May be used only on the training thread."""

    def __init__(
        self,
        job: Job,
        shard_map: coordinator_pb.ShardMap,
        tensors: Sequence[HostTensor],
        optimizer: ServerOptimizer,
        options: AsyncOptions,
        metrics: WorkerMetrics,
        compressor: GradientCompressor | None = None,
    ) -> None:
        """Creates a link to each server. Does not connect yet. `compressor`: compressor for pushed
        gradients; None: no compression."""
        self._job = job
        self._optimizer = optimizer
        self._options = options
        self._lost = metrics.pushes_lost.inc
        self._tensors = tuple(tensors)
        self._trained = tuple(tensor for tensor in tensors if tensor.trained)
        self._closing = threading.Event()
        partitions = [partition.partition_id for partition in shard_map.partitions]
        self._ledger = Ledger(partitions)
        self._payloads = Payloads(
            compressor, partitions, stream=xxhash.xxh3_64_intdigest(job.member_id.encode())
        )
        self._links = [self._link(share) for share in shares(shard_map, tensors)]
        self._pool = ThreadPoolExecutor(
            max_workers=_MOST_SERVERS, thread_name_prefix="shoal-server"
        )
        self._prefetch = Prefetch(self._trained, self._ledger) if options.prefetch else None
        self._snapshot: threading.Thread | None = None

    def configure(self) -> None:
        """Sets the optimizer and the consistency on each server. Raises the same errors as
        `ServerLink.configure`."""
        self._each(ServerLink.configure)

    def start(self, *, has_values: bool, joins_late: bool = False) -> bool:
        """Initializes any uninitialized servers with rank 0's values, and loads the servers' values
        into the module. Returns whether a server was uninitialized and received this worker's
        values. Raises the same errors as `ServerLink.start`.
        """
        self._each(lambda link: link.start(has_values=has_values, joins_late=joins_late))
        publish(self._tensors)
        return any(link.gave_values for link in self._links)

    def exchange(self, iteration: Iteration) -> Pushed:
        """Pushes gradients, and pulls values or, with `prefetch`, starts a pull. Raises the same
        errors as `ServerLink.exchange`."""
        ahead = self._prefetch if iteration.pull else None
        delivery = Delivery(
            iteration=iteration if ahead is None else replace(iteration, pull=False)
        )
        self._each(lambda link: link.exchange(delivery))
        if ahead is not None:
            # Not before the push, which includes the versions of the values used to compute its
            # gradients.
            self._land()
            ahead.begin(self._links)
        elif iteration.pull:
            publish(self._trained)
        if iteration.batch and not iteration.in_part:
            self.finished(iteration.batch)
        return delivery.outcome()

    def finished(self, batch: int) -> None:
        """Records that all pushes of the batch with key `batch` have been acknowledged. The next
        push reports this to the servers."""
        for link in self._links:
            link.finished(batch)

    def take_prefetched(self) -> None:
        """Loads prefetched values into the module if they have arrived. Must be called between
        steps."""
        if self._prefetch is not None and self._prefetch.is_there:
            self._land()

    def _land(self) -> None:
        if self._prefetch is not None and self._prefetch.land():
            publish(self._trained)

    def pull(self) -> None:
        """Pulls newer values into the module, outside of a step."""
        if self._prefetch is not None:
            with self._job.waits.collects():
                self._prefetch.drop()
        self._each(ServerLink.pull)
        publish(self._trained)

    def read(self) -> dict[str, torch.Tensor]:
        """Returns the servers' values in separate host memory (name -> tensor). The module is not
        changed.
        """
        values = {
            t.name: torch.empty(t.parameter.shape, dtype=t.parameter.dtype, device="cpu")
            for t in self._tensors
        }
        flat = {name: value.reshape(-1) for name, value in values.items()}
        self._each(lambda link: link.read(flat))
        return values

    def enter(self, clock: int) -> None:
        """Makes this worker participate, and pulls the values for its next iteration. From now on,
        other workers may have to wait for it. `clock`: number of iterations that it has finished.
        """
        placed_on: Sequence[ServerLink] = ()
        while placed_on is not self._links:  # again if partitions have moved since
            positions = self._each(lambda link: link.enter(clock))
            placed_on = self._links
            if self._options.in_step:
                self._place(aligned(positions))
        pulled: set[int] = set()
        self._each(lambda link: link.pull_in_turn(pulled))
        publish(self._trained)

    def _place(self, positions: Sequence[int | None]) -> None:
        """Sets this worker's position on each server. `positions`: one position per link, in the
        same order."""
        places = dict(zip((link.index for link in self._links), positions, strict=True))
        self._each(lambda link: link.place(places.get(link.index)))

    def rest(self) -> None:
        """Reports that no worker needs to wait for this worker until it calls `enter` again. Does
        nothing after `close`, which has already reported this."""
        if not self._closing.is_set():
            self._each(ServerLink.rest)

    def write_snapshots(self) -> None:
        """Makes each server write its snapshot in the background while training continues. Failures
        are logged."""
        if self._snapshot is None or not self._snapshot.is_alive():
            self._snapshot = threading.Thread(
                target=self._write_snapshots, name="shoal-server-snapshots", daemon=True
            )
            self._snapshot.start()

    def close(self) -> None:
        """Deregisters this worker, so that no worker waits for it, and cancels all calls.
        Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._snapshot is not None:
            self._snapshot.join()
        if self._options.waits_for_others:
            # One after another: at interpreter exit, a pool does not accept more work.
            for link in self._links:
                link.leave(_LEAVE_PATIENCE)
        self._abort()

    def _each(self, call: Callable[[ServerLink], AnswerT]) -> list[AnswerT]:
        """Calls `call` with each link and returns the servers' responses in the order of the links.
        If partitions have moved, calls all servers again."""
        self._job.waits.trains()
        if self._prefetch is not None:
            with self._job.waits.collects():
                self._prefetch.wait()
        while True:
            try:
                return self._each_once(call)
            except ShardMapChanged as changed:
                self._deal_out(changed.shard_map)

    def _each_once(self, call: Callable[[ServerLink], AnswerT]) -> list[AnswerT]:
        if len(self._links) == 1:
            return [call(self._links[0])]
        futures: list[Future[AnswerT]] = [self._pool.submit(call, link) for link in self._links]
        try:
            with self._job.waits.collects():
                wait_for_all(futures)
        except BaseException:  # including Ctrl-C: the interpreter waits for threads before it exits
            self._closing.set()
            self._abort()
            raise
        failed = [error for future in futures if (error := future.exception()) is not None]
        for error in failed:
            if not isinstance(error, ShardMapChanged):
                raise error
        changes = [error for error in failed if isinstance(error, ShardMapChanged)]
        if changes:
            raise max(changes, key=lambda changed: changed.shard_map.epoch)
        return [future.result() for future in futures]

    def _deal_out(self, shard_map: coordinator_pb.ShardMap) -> None:
        """Updates the links to the current assignment of partitions to servers."""
        dealt = shares(shard_map, self._tensors)
        before = {(link.index, link.address): link for link in self._links}
        # A new server may have the same index as a drained one. Everything that can fail is done
        # first.
        made = [self._link(share) for share in dealt if (share.index, share.address) not in before]
        for link in made:
            link.joins(self._links)
        kept = [
            before.pop((share.index, share.address))
            for share in dealt
            if (share.index, share.address) in before
        ]
        by_index = {share.index: share for share in dealt}
        for link in kept:
            link.adopt(by_index[link.index])
        _log.info(
            "partitions moved between parameter servers (shard map epoch %d): there are now %d "
            "servers instead of %d",
            shard_map.epoch,
            len(dealt),
            len(self._links),
        )
        self._links = sorted([*kept, *made], key=lambda link: link.index)
        for link in before.values():
            link.close()

    def _link(self, share: ServerShare) -> ServerLink:
        return ServerLink(
            *(self._job, share, self._optimizer, self._options),
            ledger=self._ledger,
            payloads=self._payloads,
            closing=self._closing,
            lost=self._lost,
        )

    def _write_snapshots(self) -> None:
        for link in self._links:
            try:
                _log.info("wrote a server snapshot at %s", link.snapshot())
            except ShoalError as error:
                level = logging.INFO if error.reason == "SNAPSHOTS_OFF" else logging.WARNING
                _log.log(
                    level, "a parameter server wrote no snapshot with this checkpoint: %s", error
                )

    def _abort(self) -> None:
        for link in self._links:
            link.close()
        self._pool.shutdown(wait=False)


def aligned(positions: Sequence[Position | None]) -> list[int | None]:
    """Returns, for each server, the position at which a worker that joins a run in progress starts,
    in that server's count. On all servers, the worker is then at the same iteration. None: no
    change.

    The servers respond one after another, and an iteration may begin between two responses, so the
    worker's positions may differ. The servers' own counts cannot be compared, but each server also
    reports the worker's position in the count of every other member, and a member's count is the
    same on all servers. In that count, the worker starts at the highest of its positions. If there
    are several members, the one whose counts differ least is used, because other members may have
    rested between two responses.
    """
    placed = [position for position in positions if position is not None]
    common = (
        set.intersection(*(set(position.by_others) for position in placed)) if placed else set()
    )
    if not common:
        return [None] * len(positions)

    def places(member: str) -> list[int]:
        return [position.by_others[member] for position in placed]

    member = min(sorted(common), key=lambda m: max(places(m)) - min(places(m)))
    furthest = max(places(member))
    missing = [None if p is None else furthest - p.by_others[member] for p in positions]
    return [
        p.clock + lag if p is not None and lag else None
        for p, lag in zip(positions, missing, strict=True)
    ]
