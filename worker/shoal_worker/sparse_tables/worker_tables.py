"""Sparse tables of a worker's model under async_sgd. Forward passes look up rows on the parameter
servers, and steps push gradients to them.

Rows are looked up (row_reader.py) when the training thread needs them, or in advance (`prefetch`),
while pushes are in progress. A step's pushes to tables are sent together with its dense gradients,
under the same sequence numbers, clock and batch (server_link.py); this module only creates the
pushes.

May be used only on the training thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Final

import numpy as np
from shoal_common.errors import (
    ConfigurationError,
    InvalidRequestError,
    LimitError,
    ShoalError,
)
from shoal_common.formats.wire import LARGEST_PAYLOAD_BYTES
from shoal_common.tables.values import Ids, Values
from shoal_common.tables.wire import by_bucket, pushed_payload
from shoal_protos.v1 import coordinator_pb2 as coordinator_pb
from torch import nn

from shoal_worker.elastic.contract.loader_interface import StopTraining
from shoal_worker.parameter_servers.coordination.job import Job
from shoal_worker.parameter_servers.pushed_rows import ROWS_DTYPE, PushedRows
from shoal_worker.sparse_tables.embedding import LookedUp, RowGradients, SparseEmbedding, tables_of
from shoal_worker.sparse_tables.row_reader import RowReader
from shoal_worker.sparse_tables.server_rows import ServerRowStore

_MOST_PREFETCHES: Final = 4
"""Maximum number of prefetches for a table. With more, the oldest unused prefetches are dropped."""


def check_names(module: nn.Module, tables: Sequence[SparseEmbedding]) -> None:
    """Raises ConfigurationError if two tables, or a table and a parameter, have the same name."""
    names = [table.name for table in tables]
    taken = {name for name, _ in module.named_parameters()}
    for name in names:
        if name in taken or names.count(name) > 1:
            raise ConfigurationError(
                f"table name={name!r} is also the name of another table or of a parameter; give "
                "each table its own name"
            )


def table_specs(tables: Iterable[SparseEmbedding]) -> list[coordinator_pb.TensorSpec]:
    """Returns the tables' specifications for the DeclareTensors RPC."""
    return [
        coordinator_pb.TensorSpec(
            name=table.name, shape=table.shape, dtype=ROWS_DTYPE.name, table=table.spec.message()
        )
        for table in tables
    ]


def buckets_of_tables(
    shard_map: coordinator_pb.ShardMap, tables: Iterable[SparseEmbedding]
) -> dict[str, tuple[int, ...]]:
    """Returns the partitions of each table, by bucket number."""
    found: dict[str, tuple[int, ...]] = {}
    for table in tables:
        index = next(
            number for number, tensor in enumerate(shard_map.tensors) if tensor.name == table.name
        )
        buckets = [
            each
            for each in shard_map.partitions
            if each.HasField("bucket") and each.bucket.tensor_index == index
        ]
        found[table.name] = tuple(
            each.partition_id for each in sorted(buckets, key=lambda each: each.bucket.number)
        )
    return found


def pushed_rows(
    table: SparseEmbedding, partitions: Sequence[int], gradients: RowGradients
) -> dict[int, PushedRows]:
    """Returns a step's push to each bucket of the table; buckets without rows in this step get an
    empty push. `partitions`: partitions of the table, by bucket number.

    Raises:
        InvalidRequestError (GRADIENT_NOT_FINITE): gradients are not finite; the message names the
            table. The step must not be pushed.
        LimitError (PAYLOAD_TOO_LARGE): there are more rows than one push can carry. The step must
            not be pushed.
    """
    _check_finite(table, gradients.ids, gradients.values)
    found: dict[int, PushedRows] = {}
    for partition_id, places in zip(
        partitions, by_bucket(gradients.ids, len(partitions)), strict=True
    ):
        data = pushed_payload(gradients.ids[places], gradients.values[places])
        _check_size(table, len(places), data.nbytes)
        found[partition_id] = PushedRows(
            partition_id=partition_id,
            version=gradients.versions[partition_id],
            rows=len(places),
            length=len(places) * table.embedding_dim,
            data=data,
        )
    return found


class Tables:
    """All sparse tables of a worker's model."""

    def __init__(self, module: nn.Module) -> None:
        """Finds the model's tables. Does not connect yet.

        Raises:
            ConfigurationError: two tables, or a table and a parameter, have the same name."""
        self._tables = tables_of(module)
        check_names(module, self._tables)
        self._partitions: dict[str, tuple[int, ...]] = {}
        """Partitions of each table, by bucket number."""
        self._reader: RowReader | None = None
        self.store: ServerRowStore | None = None
        """The rows, for checkpoints; None if there are no tables, or they are not connected yet."""

    def __bool__(self) -> bool:
        return bool(self._tables)

    def specs(self) -> list[coordinator_pb.TensorSpec]:
        """Returns the tables' specifications for the DeclareTensors RPC."""
        return table_specs(self._tables)

    def connect(
        self,
        job: Job,
        shard_map: coordinator_pb.ShardMap,
        *,
        patience: timedelta,
        stopped: Callable[[StopTraining], None],
    ) -> None:
        """Connects the tables to the servers, which provide the rows from now on.

        Args:
            patience: maximum time that a server may be unreachable.
            stopped: called on the training thread if the run ends while that thread waits for rows.

        Raises:
            ConfigurationError: a table has already been trained in this process.
        """
        if not self._tables:
            return
        self._reader = RowReader(job, shard_map, patience=patience)
        self._partitions = buckets_of_tables(shard_map, self._tables)
        self.store = ServerRowStore(job, self._reader, self._tables, self._partitions)
        for table in self._tables:
            table.come_from(
                ServerRows(self._reader, self._partitions[table.name], table.embedding_dim, stopped)
            )

    def pushes(self) -> dict[int, PushedRows]:
        """Returns this step's push to each partition, for every table with a gradient.
        `drop_gradients` must be called once the pushes have been acknowledged. Raises the same
        errors as `pushed_rows`."""
        found: dict[int, PushedRows] = {}
        for table in self._tables:
            gradients = table.gradients()
            if gradients is not None:
                found |= pushed_rows(table, self._partitions[table.name], gradients)
        return found

    def drop_gradients(self) -> None:
        """Discards the step's gradients, once they have been pushed or are no longer needed."""
        for table in self._tables:
            table.drop_gradients()

    def close(self) -> None:
        """Cancels lookups in progress and rejects further lookups. Idempotent."""
        if self._reader is not None:
            self._reader.close()


class ServerRows:
    """Implements `RowSource` for one table whose rows are on the servers."""

    def __init__(
        self,
        reader: RowReader,
        partitions: Sequence[int],
        dim: int,
        stopped: Callable[[StopTraining], None],
    ) -> None:
        self._reader = reader
        self._partitions = partitions
        self._dim = dim
        self._stopped = stopped
        self._ahead: deque[tuple[Ids, Future[LookedUp]]] = deque(maxlen=_MOST_PREFETCHES)
        """Prefetches, oldest first: the ids in ascending order, and their rows."""

    def look_up(self, ids: Ids) -> LookedUp:
        """Implements `RowSource.look_up`. Raises the same errors as `RowReader.read`. If a prefetch
        has failed, ignores its error and reads the rows."""
        try:
            return self._prefetched(ids) or self._reader.read(self._partitions, self._dim, ids)
        except StopTraining as stop:
            self._stopped(stop)
            raise

    def prefetch(self, ids: Ids) -> None:
        """Implements `RowSource.prefetch`."""
        self._ahead.append((ids, self._reader.read_ahead(self._partitions, self._dim, ids)))

    def _prefetched(self, ids: Ids) -> LookedUp | None:
        """Returns the rows from the oldest prefetch that contains all these ids, and drops this and
        all earlier prefetches. Returns None if there is no such prefetch, or if it has failed."""
        for number, (known, future) in enumerate(self._ahead):
            if not len(known) or not len(ids):
                continue
            places = np.minimum(np.searchsorted(known, ids), len(known) - 1)
            if not (known[places] == ids).all():
                continue
            for _ in range(number + 1):
                self._ahead.popleft()
            self._reader.await_ahead(future)
            try:
                found = future.result()
            except ShoalError:
                return None
            return LookedUp(values=found.values[places], versions=found.versions)
        return None


def _check_size(table: SparseEmbedding, rows: int, nbytes: int) -> None:
    """Raises LimitError if a push is too large. Must be called before anything is pushed, because a
    server would reject the push after other parts of the step have been applied."""
    if nbytes > LARGEST_PAYLOAD_BYTES:
        raise LimitError(
            f"table {table.name!r}: the batch has {rows} rows in one of its {table.spec.buckets} "
            f"buckets, {nbytes} bytes to push; expected at most {LARGEST_PAYLOAD_BYTES} bytes: "
            "use smaller batches, or more buckets",
            reason="PAYLOAD_TOO_LARGE",
        )


def _check_finite(table: SparseEmbedding, ids: Ids, values: Values) -> None:
    culprits = ~np.isfinite(values).all(axis=1)
    if count := int(culprits.sum()):
        raise InvalidRequestError(
            f"the gradient of table {table.name!r} has NaN or infinite values in {count} of "
            f"{len(ids)} rows, first in that of id {ids[culprits][0]}; nothing was pushed. Skip "
            "the batch (optimizer.zero_grad(), then optimizer.step()), or lower the learning rate",
            reason="GRADIENT_NOT_FINITE",
        )
