"""Sparse tables of a model whose ranks take steps together (ddp). Row gradients are summed across
ranks and pushed once per step.

An aborted step must leave the servers' rows unchanged, and a committed step must reach all servers
exactly once, regardless of which ranks die:

1. Before the commit all-reduce, each rank gathers all ranks' row gradients and sums them
   (`reduce`), so every rank has everything that the step must push.
2. When the step is committed, the ranks exchange one more message (`commit`). A rank that completes
   this exchange knows that all ranks have completed the commit all-reduce, so no rank will redo the
   step. If the exchange fails, the next generation serves the same purpose, because all of its
   ranks have committed the step.
3. Only then are the sums pushed (`deliver`). Each rank pushes a share of the buckets, with a key
   that is unique to the step. A server applies only one push with the same key to each bucket, no
   matter which rank sends it. If another rank's push takes too long, a rank that is waiting for it
   can therefore send the same push itself.
4. A bucket's version counts its pushes, so every rank knows each bucket's version after the last
   step, and a lookup waits until its buckets have these versions. A lower version means that a
   server has lost its data: this is logged, and the ranks agree on the current versions. A
   checkpoint contains the rows too (`row_store.py`), and returning to it restores the rows with
   their versions.

May be used only on the training thread, or on the thread of a backward pass that recomputes
activations while the training thread waits.
"""

from __future__ import annotations

import atexit
import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
import torch
from shoal_common.errors import (
    DeadlineError,
    InvalidRequestError,
    LimitError,
    MembershipChanged,
    ShoalError,
)
from shoal_common.failpoints import failpoint
from shoal_common.tables.values import Ids
from torch import nn

from shoal_worker.elastic.contract.loader_interface import StopTraining
from shoal_worker.elastic.session.session import Session
from shoal_worker.engine.base import Setup
from shoal_worker.engine.step.failed_collectives import LosingStep
from shoal_worker.parameter_servers.coordination.job import Job
from shoal_worker.parameter_servers.coordination.own_cluster import OwnCluster, open_job
from shoal_worker.parameter_servers.options import AsyncOptions, ServerOptimizer
from shoal_worker.parameter_servers.pushed_rows import PushedRows
from shoal_worker.parameter_servers.servers import ParameterServers
from shoal_worker.parameter_servers.tensors import Iteration
from shoal_worker.sparse_tables.bucket_versions import BucketVersions
from shoal_worker.sparse_tables.embedding import LookedUp, RowGradients, SparseEmbedding, tables_of
from shoal_worker.sparse_tables.row_reader import RowReader
from shoal_worker.sparse_tables.row_sums import RowSums, summed
from shoal_worker.sparse_tables.server_rows import StepRowStore
from shoal_worker.sparse_tables.worker_tables import (
    buckets_of_tables,
    check_names,
    pushed_rows,
    table_specs,
)
from shoal_worker.state.serial import load_tensors

_log = logging.getLogger(__name__)

_PATIENCE_S: Final = 1.0
"""Time that a rank waits for another rank's push before it sends the same push itself, in
seconds."""
_LAST_PATIENCE_S: Final = 30.0
"""Maximum time, in seconds, that a leaving rank waits for the other ranks to push its share, once
the servers no longer accept its own pushes."""
_SHORTEST_WAIT_S: Final = 0.0005
_LONGEST_WAIT_S: Final = 0.02
_LARGEST_NEW_KEY: Final = 1 << 62
"""Upper bound of the random number at which push keys start. They start again at a new random
number whenever versions have been read again, because servers may have seen later keys than this
rank: from a previous run, or from steps that a return to a checkpoint has undone."""


class SynchronousJob(Job):
    """The job of a worker that takes steps together with other ranks. Such a worker leaves only at
    step boundaries, when all ranks have agreed. A request to leave therefore never ends a wait for
    a server."""

    takes_steps = False

    @property
    def leaving(self) -> bool:
        """False once the worker has begun to take steps. Before that, True if the worker has been
        asked to leave; see `Job.leaving`."""
        return not self.takes_steps and super().leaving


@dataclass(kw_only=True)
class _Step:
    """One step's gradients of all tables, and its pushes to their buckets."""

    key: int
    """Unique key of the step, sent with its pushes."""
    gradients: Mapping[str, RowGradients]
    """Mean gradients over the batch, by table name."""
    pushes: Mapping[int, PushedRows]
    """The push to each partition."""
    generation: int
    """Generation that summed the step."""
    known_to_all: bool = False
    """True if it is known that no rank will repeat the step."""
    delivered_as: tuple[int, int] | None = None
    """Number of pushing ranks and this rank's index among them, at the time when this rank last
    pushed its share; None if it has not pushed yet."""
    unseen: set[int] = field(default_factory=set)
    """Partitions that are not yet known to have received the step's push."""

    def __post_init__(self) -> None:
        self.unseen = set(self.pushes)


class ServerStepTables:
    """Implements `StepTables` (sparse_tables/ddp_hook.py) for tables whose rows are on the job's
    parameter servers."""

    def __init__(self, setup: Setup, tables: Sequence[SparseEmbedding]) -> None:
        """Finds the model's tables. Does not connect yet.

        Raises:
            ConfigurationError: two tables, or a table and a parameter, have the same name.
        """
        check_names(setup.module, tables)
        self._setup = setup
        self._session = setup.session
        self._own = cast(Session, setup.session)
        """The session itself, used for its membership, metrics and shutdown."""
        self._tables = tables
        self._by_name = {table.name: table for table in tables}
        self._options = AsyncOptions()
        self._sums_losses = setup.config.loss_reduction == "sum"
        self._own_cluster: OwnCluster | None = None
        self._servers: ParameterServers | None = None
        self._reader: RowReader | None = None
        self._store: StepRowStore | None = None
        self._partitions: dict[str, tuple[int, ...]] = {}
        """Partitions of each table, by bucket number."""
        self._here = RowSums(tables)
        self._stale = False
        """True if rows looked up in this step lack part of the last step, so this step must not be
        committed."""
        self._next_key = 0
        """Key of the next step that pushes; 0 if no step has pushed yet."""
        self._versions = BucketVersions(
            table_of=self._table_of, lost=self._own.metrics.pushes_lost.inc
        )
        self._staged: _Step | None = None
        """The current step, once its gradients are summed; otherwise None."""
        self._pending: _Step | None = None
        """The last committed step, until all partitions are known to have received it; otherwise
        None."""
        self._shut_out = False
        """True if this rank is about to leave and the servers no longer accept its pushes. The
        other ranks then push its share."""
        self._clock = 0
        self._early: Mapping[str, Any] | None = None
        """State that was loaded before the servers were connected; None if there is none."""

    # ----------------------------------------------------------------------------------- StepTables

    def connect(self) -> None:
        """Implements `StepTables.connect`."""
        unused = nn.Parameter(torch.zeros(0))
        atexit.register(self._close)
        self._own.on_close(self._close)
        try:
            job, self._own_cluster = open_job(self._own, SynchronousJob)
            shard_map = job.declare(table_specs(self._tables))
            # Servers require an optimizer for dense tensors, although there are none; each table
            # has its own optimizer.
            schedule = ServerOptimizer(torch.optim.SGD([unused], lr=1.0), {id(unused): ""})
            self._servers = ParameterServers(
                job, shard_map, (), schedule, self._options, self._own.metrics
            )
            self._revision = schedule.look()
            self._servers.configure()
            self._reader = RowReader(job, shard_map, patience=self._options.server_timeout)
            self._partitions = buckets_of_tables(shard_map, self._tables)
            self._store = StepRowStore(
                *(job, self._reader, self._tables, self._partitions),
                settle=self._see_all,
                expected=self._versions.get,
                found=self._note,
            )
            for table in self._tables:
                table.come_from(_Rows(self, self._partitions[table.name], table.embedding_dim))
            job.takes_steps = True
        except StopTraining as stop:
            self._close()
            self._own.lifecycle.give_up_step(stop)
            raise
        except BaseException:
            self._close()
            raise
        if self._early is not None:
            self.restore(self._early)

    def step_begins(self) -> None:
        """Implements `StepTables.step_begins`."""
        self._forget()
        self.deliver()

    def micro_batch_ends(self, weight: float) -> None:
        """Implements `StepTables.micro_batch_ends`."""
        self._here.take((1.0 if self._sums_losses else weight) if weight else 0.0, weight=weight)

    def reduce(self) -> None:
        """Implements `StepTables.reduce`."""
        step, group = self._session.step, self._session.group
        if self._staged is not None or step is None or step.share is None:
            return
        if not step.in_micro_batches:
            share = step.share
            mean = share.weight / share.total_weight if share.total_weight else 0.0
            self._here.take(float(mean > 0) if self._sums_losses else mean)
        self._see_all()
        metadata = {
            "versions": self._versions.encode(),
            "key": self._next_key,
            "new_key": 1 + secrets.randbelow(_LARGEST_NEW_KEY) if self._versions.found_anew else 0,
            "stale": self._stale,
        }
        with LosingStep(self._session) as exchanging:
            if group is None and self._session.elastic:
                raise MembershipChanged("there is no group")
            payload = self._here.dump(metadata)
            payloads = group.exchange(payload) if group is not None else [payload]
            failpoint("tables.summed")
            try:
                staged = self._combined(
                    [load_tensors(each) for each in payloads],
                    in_micro_batches=step.in_micro_batches,
                )
            except (InvalidRequestError, LimitError) as error:
                step.refused = error  # every rank gets the same sums
                return
        if not exchanging.failed:
            self._staged = staged

    def commit(self) -> None:
        """Implements `StepTables.commit`."""
        staged, self._staged = self._staged, None
        self._forget()
        if staged is None:
            return
        self._next_key = staged.key + 1
        self._versions.step_counts(staged.pushes)
        if not staged.pushes:
            return
        self._pending = staged
        group = self._session.group
        try:
            if group is not None:
                group.rendezvous()
        except MembershipChanged as error:
            _log.info(
                "it is not yet known whether all ranks have committed the step; the ranks of the "
                "next generation will find out: %s",
                error,
            )
        else:
            staged.known_to_all = True
        failpoint("tables.met")

    def discard(self) -> None:
        """Implements `StepTables.discard`."""
        self._staged = None
        self._forget()

    def deliver(self) -> None:
        """Implements `StepTables.deliver`."""
        pending = self._pending
        if pending is None or not self._may_push(pending):
            return
        # If the exchange failed, a rank may have failed, and its share would not be pushed: push
        # everything.
        ranks, place = self._pushing() if pending.known_to_all else (1, 0)
        if pending.delivered_as == (ranks, place):
            return
        self._push(
            pending,
            [each for number, each in enumerate(sorted(pending.pushes)) if number % ranks == place],
        )
        pending.delivered_as = ranks, place

    def _pushing(self) -> tuple[int, int]:
        """Returns the number of ranks that push the last step, and this rank's index among them.

        As soon as the coordinator has formed a generation without a leaving rank, servers reject
        that rank's pushes, so the other ranks also push its share. Ranks learn about the new
        generation at different times. A rank that has already pushed its share under the old
        division then pushes its new share.
        """
        membership, group = self._own.membership, self._session.group
        newest = membership.link.newest_generation if membership is not None else None
        ranks, rank = self._session.world_size, self._session.rank
        if group is None or newest is None or newest.number == group.generation.number:
            return ranks, rank
        stay, known = {each.member_id for each in newest.known or ()}, group.generation.known or ()
        pushing = [each.rank for each in known if each.member_id in stay]
        return (len(pushing), pushing.index(rank)) if rank in pushing else (ranks, rank)

    def drop_gradients(self) -> None:
        """Implements `StepTables.drop_gradients`."""
        for table in self._tables:
            table.drop_gradients()
        if self._session.step is not None:
            self._session.step.refused = None

    @property
    def store(self) -> StepRowStore:
        """The tables' rows, for checkpoints; see `StepTables`."""
        assert self._store is not None
        return self._store

    def capture(self) -> dict[str, Any]:
        """Implements `StepTables.capture`."""
        if not self._versions:
            return {}
        pending = None
        if self._pending is not None:
            rows = {
                name: {"ids": torch.from_numpy(each.ids), "values": torch.from_numpy(each.values)}
                for name, each in self._pending.gradients.items()
            }
            pending = {"key": self._pending.key, "rows": rows}
        return {"next_key": self._next_key, "versions": self._versions.encode(), "pending": pending}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Implements `StepTables.restore`."""
        if self._servers is None:
            self._early = state
            return
        self._forget()
        self._staged = self._pending = None
        self._versions.restore(state["versions"] if state else {})
        if not state:
            return
        self._next_key = state["next_key"]
        if state["pending"] is not None:
            gradients = {
                name: RowGradients(
                    ids=rows["ids"].numpy(), values=rows["values"].numpy(), versions={}
                )
                for name, rows in state["pending"]["rows"].items()
            }
            self._pending = self._step(state["pending"]["key"], gradients, steps_back=1)
            self._pending.known_to_all = True

    # -------------------------------------------------------------------------------------- lookups

    def look_up(self, partitions: Sequence[int], dim: int, ids: Ids) -> LookedUp:
        """Returns the rows with these ids as of the last step. The ids must be distinct.

        Raises:
            PreconditionError (TABLE_AHEAD): a different job is training the rows.
            DeadlineError: this rank was asked to leave, and the other ranks have not pushed its
                share of the last step in time.
            ShoalError: as in `RowReader.read`.
        """
        waits = _SHORTEST_WAIT_S
        since = time.monotonic()
        looked_anew = False
        while True:
            found = self._require_reader().read(partitions, dim, ids)
            if self._session.is_joining or self._is_aborted:
                return found  # results computed from these rows are not used
            pending = self._pending
            behind = {
                each for each in partitions if found.versions[each] < self._versions.get(each)
            }
            if not behind:
                self._note(found.versions)
                return found
            if pending is not None and not self._may_push(pending):
                self._stale = True
                return found
            if pending is None or not pending.unseen & behind:  # the server has lost its data
                if looked_anew:
                    self._note(found.versions)
                    return found
                self._require_reader().find_for_certain()
                looked_anew = True
                continue
            if self._shut_out:
                if time.monotonic() - since > _LAST_PATIENCE_S:
                    raise DeadlineError(
                        f"waited {_LAST_PATIENCE_S:.0f} s for the other ranks to push rows of "
                        "the last step, because the servers no longer accept pushes from this "
                        "rank, which was asked to leave; see the logs of the other ranks"
                    )
            elif time.monotonic() - since > _PATIENCE_S:
                _log.info(
                    "pushing rows on behalf of another rank, which did not push them within %.0f s",
                    _PATIENCE_S,
                )
                self._push(pending, sorted(pending.unseen))
            else:
                self.deliver()
            time.sleep(waits)
            waits = min(2 * waits, _LONGEST_WAIT_S)

    def _note(self, versions: Mapping[int, int]) -> None:
        """Records versions read from these partitions, and logs a warning if the servers lack
        earlier pushes. Raises the same errors as `BucketVersions.note`."""
        self._versions.note(versions)
        self._saw(versions)

    def _table_of(self, partition_id: int) -> str:
        return next(
            name for name, partitions in self._partitions.items() if partition_id in partitions
        )

    def _saw(self, partitions: Iterable[int]) -> None:
        """Records that these partitions have received all committed pushes."""
        if self._pending is None:
            return
        self._pending.unseen.difference_update(partitions)
        if not self._pending.unseen:
            self._require_servers().finished(self._pending.key)
            self._pending = None

    def _see_all(self) -> None:
        """Waits until all partitions have received the last step and this rank knows their
        versions. Returns early if the current step turns out to be one that must not be committed.
        """
        for table in self._tables:
            partitions = self._partitions[table.name]
            awaited = self._pending is not None and self._pending.unseen.intersection(partitions)
            if awaited or not self._versions.has_all(partitions):
                self.look_up(
                    self._partitions[table.name], table.embedding_dim, np.empty(0, dtype=np.int64)
                )

    # ---------------------------------------------------------------------------------------- steps

    def _combined(
        self,
        received: Sequence[tuple[dict[str, torch.Tensor], dict[str, Any]]],
        *,
        in_micro_batches: bool,
    ) -> _Step:
        """Combines the row gradients of all ranks into a step's pushes. The result is the same on
        all ranks.

        Raises:
            MembershipChanged: the ranks have looked up rows of different steps, so the step must be
                redone.
            InvalidRequestError, LimitError: as described in `StepTables.reduce`.
        """
        metadata = [each for _, each in received]
        if any(each["stale"] for each in metadata):
            raise MembershipChanged(
                "a rank looked up rows before all rows of the last step were pushed"
            )
        self._versions.agree(
            [
                {int(number): version for number, version in each["versions"].items()}
                for each in metadata
            ]
        )
        key = max(each["new_key"] for each in metadata) or max(
            1, *(each["key"] for each in metadata)
        )
        weight = sum(each["weight"] for each in metadata)
        divisor = weight if in_micro_batches and weight and not self._sums_losses else 1.0
        gradients: dict[str, RowGradients] = {}
        for name in self._by_name:
            parts = [
                (each[f"{name}/ids"].numpy(), each[f"{name}/sums"].numpy())
                for each, _ in received
                if f"{name}/ids" in each
            ]
            if parts:
                ids, sums = summed(parts)
                gradients[name] = RowGradients(
                    ids=ids, values=(sums / divisor).astype(np.float32), versions={}
                )
        return self._step(key, gradients)

    def _step(
        self, key: int, gradients: Mapping[str, RowGradients], *, steps_back: int = 0
    ) -> _Step:
        """Creates a step's pushes. `steps_back`: 0 for the current step; 1 for the last committed
        step, which the known versions already include."""
        pushes: dict[int, PushedRows] = {}
        for name, each in gradients.items():
            partitions = self._partitions[name]
            versions = {
                partition_id: self._versions[partition_id] - steps_back
                for partition_id in partitions
            }
            pushes |= pushed_rows(
                self._by_name[name],
                partitions,
                RowGradients(ids=each.ids, values=each.values, versions=versions),
            )
        return _Step(key=key, gradients=gradients, pushes=pushes, generation=self._generation)

    def _may_push(self, step: _Step) -> bool:
        """Returns whether the step may be pushed: it is known that no rank will redo it."""
        return step.known_to_all or not self._session.elastic or self._generation != step.generation

    def _push(self, step: _Step, partitions: Sequence[int]) -> None:
        rows = {each: step.pushes[each] for each in partitions if each in step.unseen}
        if not rows or self._shut_out:
            return
        self._clock += 1
        iteration = Iteration(
            clock=self._clock,
            revision=self._revision,
            gradients={},
            pull=False,
            batch=step.key,
            in_part=True,
            rows=rows,
        )
        try:
            self._require_servers().exchange(iteration)
        except StopTraining as stop:
            if self._own.membership is not None and self._own.membership.link.excluded:
                self._shut_out = True
                _log.info(
                    "the parameter servers no longer accept rows from this rank, because it is "
                    "leaving; the other ranks push its share: %s",
                    stop,
                )
            else:
                _log.warning(
                    "rows of the last step were not pushed, because the job was stopped: %s",
                    stop,
                )
            return
        failpoint("tables.pushed")
        self._saw(rows)

    def _forget(self) -> None:
        """Discards the state of the current step."""
        self.drop_gradients()
        self._here.clear()
        self._stale = False

    @property
    def _is_aborted(self) -> bool:
        step = self._session.step
        return step is not None and step.lost is not None

    @property
    def _generation(self) -> int:
        group = self._session.group
        return group.generation.number if group is not None else 0

    def _close(self) -> None:
        """Closes the tables. Idempotent."""
        atexit.unregister(self._close)
        if self._pending is not None:
            self._push_the_last(self._pending)
        self._pending = None
        if self._reader is not None:
            self._reader.close()
        if self._servers is not None:
            self._servers.close()
        if self._own_cluster is not None:
            self._own_cluster.close()
            self._own_cluster = None

    def _push_the_last(self, step: _Step) -> None:
        """Makes sure at the end of the run that the servers have the last step: pushes all shares
        that may be missing, including those of other ranks, because no later lookup would notice a
        missing push."""
        if self._shut_out:
            return
        if not self._may_push(step):
            _log.warning(
                "the rows of the last step were not pushed, because it is not known whether all "
                "ranks committed that step"
            )
            return
        try:
            self._push(step, sorted(step.unseen))
        except ShoalError as error:
            _log.warning("it is not known whether all rows of the last step were pushed: %s", error)

    def _require_reader(self) -> RowReader:
        assert self._reader is not None
        return self._reader

    def _require_servers(self) -> ParameterServers:
        assert self._servers is not None
        return self._servers


@dataclass(frozen=True)
class _Rows:
    """Implements `RowSource` for one table."""

    tables: ServerStepTables
    partitions: tuple[int, ...]
    dim: int

    def look_up(self, ids: Ids) -> LookedUp:
        """Implements `RowSource.look_up`. Raises the same errors as `ServerStepTables.look_up`."""
        return self.tables.look_up(self.partitions, self.dim, ids)

    def prefetch(self, ids: Ids) -> None:
        """Does nothing: rows fetched before this step's pushes would be outdated for the next
        batch."""


def step_tables(setup: Setup) -> ServerStepTables | None:
    """Returns the model's sparse tables; None if it has none. Raises the same errors as
    `ServerStepTables`."""
    tables = tables_of(setup.module)
    return ServerStepTables(setup, tables) if tables else None
