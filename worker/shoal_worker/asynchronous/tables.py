"""The sparse tables of a worker's model, whose rows are on the parameter servers: looked up there by forward passes, and pushed by steps.

Rows are looked up as an onlooker, from all servers at once, on connections of their own: on the training thread's behalf, or ahead of it
(`prefetch`), while pushes are on their way. What a step pushes of them goes with its dense gradients, under the same numbers, clock and
batch (server_link.py): here it is only made.

`Tables` and `ServerRows` belong to the training thread; `RowReader` is used by it and by the threads of prefetches.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import numpy as np
from shoal_common.backoff import Backoff
from shoal_common.clients.parameter_server import ParameterServerClient
from shoal_common.errors import (
    ConfigurationError,
    CorruptDataError,
    DeadlineError,
    InvalidRequestError,
    LimitError,
    PreconditionError,
    ShoalError,
    UnavailableError,
)
from shoal_common.tables.values import Ids, Values
from shoal_common.tables.wire import by_bucket, pulled_ids, pushed_payload
from shoal_common.wire import LARGEST_PAYLOAD_BYTES, DtypeInfo, dtype_info
from shoal_protos.v1 import coordinator_pb2 as coordinator_pb
from shoal_protos.v1 import parameter_server_pb2 as pb
from torch import nn

from shoal_worker.asynchronous.job import Job
from shoal_worker.elastic.loader_interface import StopTraining
from shoal_worker.tables import LookedUp, RowGradients, SparseEmbedding, tables_of

_DTYPE: Final = dtype_info("float32")
_LONGEST_BACKOFF_S: Final = 1.0
_LEAVES_AFTER_S: Final = 5.0
"""A worker that is to leave waits no longer for a server that is away."""
_MOST_IDS: Final = 1 << 17
"""In one request to one server."""
_MOST_BYTES: Final = 16 << 20
"""What one answer may have of rows: what a server gives of one bucket."""
_MOST_PREFETCHES: Final = 4
"""A table has no more of them; the oldest that nobody took are dropped."""
_STREAM_DEADLINE: Final = timedelta(seconds=60)
_PASSING: Final = frozenset({"STALE_SHARD_MAP", "SHARD_MAP_INCOMPLETE", "PARTITION_UNKNOWN", "JOB_UNKNOWN"})
"""Refusals that pass by themselves: servers change, or another job's server is where one of this job's was."""


@dataclass(frozen=True, kw_only=True)
class PushedRows:
    """What a step pushes to one bucket: the same bytes however often it is attempted."""

    partition_id: int
    version: int
    """That the gradients were computed on."""
    rows: int
    length: int
    """Elements of the gradients."""
    data: memoryview
    dtype: DtypeInfo = _DTYPE


def buckets_of_servers(shard_map: coordinator_pb.ShardMap) -> dict[int, tuple[int, ...]]:
    """Server index -> the partitions that are buckets of tables, of those servers that have any."""
    found: dict[int, tuple[int, ...]] = {}
    for partition in shard_map.partitions:
        if partition.HasField("bucket"):
            found[partition.primary] = (*found.get(partition.primary, ()), partition.partition_id)
    return found


def check_names(module: nn.Module, tables: Sequence[SparseEmbedding]) -> None:
    """Raises ConfigurationError: two tables, or a table and a parameter, of one name."""
    names = [table.name for table in tables]
    taken = {name for name, _ in module.named_parameters()}
    for name in names:
        if name in taken or names.count(name) > 1:
            raise ConfigurationError(f"table name={name!r} is another table's, or a parameter's; give each a name of its own")


def table_specs(tables: Iterable[SparseEmbedding]) -> list[coordinator_pb.TensorSpec]:
    """For DeclareTensors."""
    return [
        coordinator_pb.TensorSpec(name=table.name, shape=table.shape, dtype=_DTYPE.name, table=table.spec.message()) for table in tables
    ]


def buckets_of_tables(shard_map: coordinator_pb.ShardMap, tables: Iterable[SparseEmbedding]) -> dict[str, tuple[int, ...]]:
    """Table -> its buckets' partitions, by the buckets' numbers."""
    found: dict[str, tuple[int, ...]] = {}
    for table in tables:
        index = next(number for number, tensor in enumerate(shard_map.tensors) if tensor.name == table.name)
        buckets = [each for each in shard_map.partitions if each.HasField("bucket") and each.bucket.tensor_index == index]
        found[table.name] = tuple(each.partition_id for each in sorted(buckets, key=lambda each: each.bucket.number))
    return found


def pushed_rows(table: SparseEmbedding, partitions: Sequence[int], gradients: RowGradients) -> dict[int, PushedRows]:
    """Partition -> what a step pushes to it: of all buckets of the table, also those of which it has no row. `partitions`: by the buckets'
    numbers.

    Raises:
        InvalidRequestError (GRADIENT_NOT_FINITE): naming the table; nothing is to be pushed.
        LimitError (PAYLOAD_TOO_LARGE): more rows than a push may have; nothing is to be pushed.
    """
    _check_finite(table, gradients.ids, gradients.values)
    found: dict[int, PushedRows] = {}
    for partition_id, places in zip(partitions, by_bucket(gradients.ids, len(partitions)), strict=True):
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
    """All tables of the model."""

    def __init__(self, module: nn.Module) -> None:
        """Does not connect yet.

        Raises:
            ConfigurationError: two tables, or a table and a parameter, of one name.
        """
        self._tables = tables_of(module)
        check_names(module, self._tables)
        self._partitions: dict[str, tuple[int, ...]] = {}
        """Table -> its buckets' partitions, by the buckets' numbers."""
        self._reader: RowReader | None = None

    def __bool__(self) -> bool:
        return bool(self._tables)

    def specs(self) -> list[coordinator_pb.TensorSpec]:
        """For DeclareTensors."""
        return table_specs(self._tables)

    def connect(
        self, job: Job, shard_map: coordinator_pb.ShardMap, *, patience: timedelta, stopped: Callable[[StopTraining], None]
    ) -> None:
        """From now on the rows come from the servers. `patience`: how long one may be away. `stopped`: told on the training thread that
        the run ended while rows were waited for.

        Raises:
            ConfigurationError: a table was trained in this process before.
        """
        if not self._tables:
            return
        self._reader = RowReader(job, shard_map, patience=patience)
        self._partitions = buckets_of_tables(shard_map, self._tables)
        for table in self._tables:
            table.come_from(ServerRows(self._reader, self._partitions[table.name], table.embedding_dim, stopped))

    def pushes(self) -> dict[int, PushedRows]:
        """Partition -> what this step pushes to it, of each table with a gradient. Call `drop_gradients` when it has been acknowledged.
        Raises as `pushed_rows`."""
        found: dict[int, PushedRows] = {}
        for table in self._tables:
            gradients = table.gradients()
            if gradients is not None:
                found |= pushed_rows(table, self._partitions[table.name], gradients)
        return found

    def drop_gradients(self) -> None:
        """The step's gradients were pushed, or are of no use."""
        for table in self._tables:
            table.drop_gradients()

    def close(self) -> None:
        """Ends lookups that are on their way, and refuses others. Idempotent."""
        if self._reader is not None:
            self._reader.close()


class ServerRows:
    """One table's rows on the servers. A `RowSource`."""

    def __init__(self, reader: RowReader, partitions: Sequence[int], dim: int, stopped: Callable[[StopTraining], None]) -> None:
        self._reader = reader
        self._partitions = partitions
        self._dim = dim
        self._stopped = stopped
        self._ahead: deque[tuple[Ids, Future[LookedUp]]] = deque(maxlen=_MOST_PREFETCHES)
        """Ids, ascending, and their rows, the oldest first."""

    def look_up(self, ids: Ids) -> LookedUp:
        """See `RowSource`. Raises as `RowReader.read`; a prefetch that failed is one that was not made."""
        try:
            return self._prefetched(ids) or self._reader.read(self._partitions, self._dim, ids)
        except StopTraining as stop:
            self._stopped(stop)
            raise

    def prefetch(self, ids: Ids) -> None:
        """See `RowSource`."""
        self._ahead.append((ids, self._reader.read_ahead(self._partitions, self._dim, ids)))

    def _prefetched(self, ids: Ids) -> LookedUp | None:
        """Takes the oldest that has all of these, and drops those before it."""
        for number, (known, future) in enumerate(self._ahead):
            if not len(known) or not len(ids):
                continue
            places = np.minimum(np.searchsorted(known, ids), len(known) - 1)
            if not (known[places] == ids).all():
                continue
            for _ in range(number + 1):
                self._ahead.popleft()
            try:
                found = future.result()
            except ShoalError:
                return None
            return LookedUp(values=found.values[places], versions=found.versions)
        return None


class RowReader:
    """Reads rows of this job's tables from its servers, wherever these are. Any thread may call."""

    def __init__(self, job: Job, shard_map: coordinator_pb.ShardMap, *, patience: timedelta) -> None:
        self._job = job
        self._patience_s = patience.total_seconds()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        """Held while what follows is looked at or changed."""
        self._map = shard_map
        self._clients: dict[str, ParameterServerClient] = {}
        """Address -> client."""
        self._servers = ThreadPoolExecutor(max_workers=max(1, len(shard_map.servers)), thread_name_prefix="shoal-rows")

    def read(self, partitions: Sequence[int], dim: int, ids: Ids) -> LookedUp:
        """The rows with these ids, each named once. `partitions`: the table's, by the buckets' numbers.

        Raises:
            DeadlineError (SERVER_AWAY): a server was away for too long.
            StopTraining: this worker is to leave, and a server is away.
            UnavailableError (CLIENT_CLOSED): the tables were left.
        """
        places = by_bucket(ids, len(partitions))
        away_since: float | None = None
        backoff = Backoff(longest_s=_LONGEST_BACKOFF_S)
        while True:
            try:
                if away_since is not None:
                    self._find()
                return self._read_all(partitions, dim, ids, places)
            except ShoalError as error:
                if self._closed.is_set():
                    raise UnavailableError("the sparse tables' servers were left with the job", reason="CLIENT_CLOSED") from error
                if not isinstance(error, UnavailableError | DeadlineError | CorruptDataError) and error.reason not in _PASSING:
                    raise
                now = time.monotonic()
                away_since = now if away_since is None else away_since
                if self._job.leaving and now - away_since > _LEAVES_AFTER_S:
                    raise self._job.departure() from error
                if now - away_since > self._patience_s:
                    raise DeadlineError(
                        f"rows of a sparse table could not be had for more than {self._patience_s:.0f} s (server_timeout): {error}",
                        reason="SERVER_AWAY",
                    ) from error
                self._closed.wait(backoff.next_s(error))

    def read_ahead(self, partitions: Sequence[int], dim: int, ids: Ids) -> Future[LookedUp]:
        """`read`, in the background."""
        future: Future[LookedUp] = Future()

        def read() -> None:
            try:
                future.set_result(self.read(partitions, dim, ids))
            except BaseException as error:
                future.set_exception(error)

        # Not a pool's: the interpreter would wait for it at its end, and it may wait for a server.
        threading.Thread(target=read, name="shoal-prefetch", daemon=True).start()
        return future

    def close(self) -> None:
        """Ends calls in progress. Idempotent."""
        self._closed.set()
        with self._lock:
            clients = list(self._clients.values())
        for client in clients:
            client.close()
        self._servers.shutdown(wait=False, cancel_futures=True)

    def _read_all(self, partitions: Sequence[int], dim: int, ids: Ids, places: Sequence[Ids]) -> LookedUp:
        """Once."""
        with self._lock:
            shard_map = self._map
        addresses = {server.server_index: server.address for server in shard_map.servers}
        owners = {partition_id: shard_map.partitions[partition_id].primary for partition_id in partitions}
        if missing := sorted({owner for owner in owners.values() if not addresses.get(owner)}):
            raise PreconditionError(f"servers {missing} are not registered", reason="SHARD_MAP_INCOMPLETE")
        values = np.empty((len(ids), dim), dtype=np.float32)
        chosen = dict(zip(partitions, places, strict=True))
        reads = []
        for owner in sorted(set(owners.values())):
            share = {partition_id: chosen[partition_id] for partition_id in partitions if owners[partition_id] == owner}
            reads.append((self._client(addresses[owner]), share))
        if len(reads) == 1:
            versions = self._read_server(*reads[0], shard_map.epoch, ids, values)
        else:
            futures = [self._servers.submit(self._read_server, client, share, shard_map.epoch, ids, values) for client, share in reads]
            try:
                wait(futures)  # also where one has failed: the others write to `values`
            except BaseException:  # Ctrl-C: the interpreter would wait for the threads before it ends
                self.close()
                raise
            versions = {partition_id: version for future in futures for partition_id, version in future.result().items()}
        return LookedUp(values=values, versions=versions)

    def _read_server(self, client: ParameterServerClient, share: Mapping[int, Ids], epoch: int, ids: Ids, values: Values) -> dict[int, int]:
        """Fills in the rows of one server's buckets, `share` of which says the places; returns the oldest version of each that was read."""
        versions: dict[int, int] = {}
        at_once = max(1, min(_MOST_BYTES // (4 * values.shape[1]), _MOST_IDS) // len(share))
        for begin in range(0, max(1, *(len(places) for places in share.values())), at_once):
            parts = {partition_id: places[begin : begin + at_once] for partition_id, places in share.items()}
            # A bucket without ids tells its version.
            wanted = {partition_id: part for partition_id, part in parts.items() if len(part) or not begin}
            versions = self._pull(client, wanted, epoch, ids, values) | versions
        return versions

    def _pull(self, client: ParameterServerClient, wanted: Mapping[int, Ids], epoch: int, ids: Ids, values: Values) -> dict[int, int]:
        """One request. Partition -> version."""
        received = {number: np.empty((len(places), values.shape[1]), dtype=np.float32) for number, places in wanted.items()}
        request = pb.PullRequest(
            job_id=self._job.job_id,
            shard_map_epoch=epoch,
            partitions=[pb.PartitionPull(partition_id=number, ids=pulled_ids(ids[places])) for number, places in wanted.items()],
            checksums=True,
        )
        headers = client.pull(request, lambda header: received[header.partition_id].data, deadline=_STREAM_DEADLINE)
        for number, places in wanted.items():
            values[places] = received[number]
        return {header.partition_id: header.version for header in headers}

    def _find(self) -> None:
        """A server that was restarted may listen elsewhere, and buckets may have moved."""
        found = self._job.shard_map()
        if found is not None:
            with self._lock:
                self._map = found

    def _client(self, address: str) -> ParameterServerClient:
        with self._lock:
            if self._closed.is_set():
                raise UnavailableError("the sparse tables' servers were left with the job", reason="CLIENT_CLOSED")
            if address not in self._clients:
                self._clients[address] = self._job.server_client(address)
            return self._clients[address]


def _check_size(table: SparseEmbedding, rows: int, nbytes: int) -> None:
    """Before anything is pushed: a server would refuse it when other parts of the step are applied."""
    if nbytes > LARGEST_PAYLOAD_BYTES:
        raise LimitError(
            f"table {table.name!r}: the batch has {rows} rows of one of its {table.spec.buckets} buckets, {nbytes} bytes to push; expected "
            f"at most {LARGEST_PAYLOAD_BYTES}: take smaller batches, or more buckets",
            reason="PAYLOAD_TOO_LARGE",
        )


def _check_finite(table: SparseEmbedding, ids: Ids, values: Values) -> None:
    culprits = ~np.isfinite(values).all(axis=1)
    if count := int(culprits.sum()):
        raise InvalidRequestError(
            f"the gradient of table {table.name!r} has {count} of {len(ids)} rows that are NaN or infinite, the first of id "
            f"{ids[culprits][0]}; nothing was pushed. Leave the batch out (optimizer.zero_grad(), then optimizer.step()), or lower the "
            "learning rate",
            reason="GRADIENT_NOT_FINITE",
        )
