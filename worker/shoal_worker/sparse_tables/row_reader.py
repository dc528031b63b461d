"""Reads rows of sparse tables by id from their servers, for lookups.

The reader only reads, so the servers do not treat it as a participating worker, and no other worker
ever waits for it. It reads from all servers in parallel, over its own connections. It may be called
from any thread, including the training thread and the threads that prefetch rows or write
checkpoints.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Final, TypeVar

import numpy as np
from shoal_common.backoff import Backoff
from shoal_common.clients.parameter_server import ParameterServerClient
from shoal_common.errors import (
    CorruptDataError,
    DeadlineError,
    PreconditionError,
    ShoalError,
    UnavailableError,
)
from shoal_common.tables.values import Ids, Values
from shoal_common.tables.wire import by_bucket, pulled_ids
from shoal_protos.v1 import coordinator_pb2 as coordinator_pb
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_worker.parameter_servers.background import in_background, wait_for_all
from shoal_worker.parameter_servers.coordination.job import Job
from shoal_worker.sparse_tables.embedding import LookedUp

_LONGEST_BACKOFF_S: Final = 1.0
_LEAVES_AFTER_S: Final = 5.0
"""Seconds after which a leaving worker stops waiting for an unreachable server."""
_MOST_IDS: Final = 1 << 17
"""Maximum number of ids in one request to one server."""
_MOST_BYTES: Final = 16 << 20
"""Maximum size of the rows in one response, in bytes. A server returns at most this much of one
bucket."""
_STREAM_DEADLINE: Final = timedelta(seconds=60)
_PASSING: Final = frozenset(
    {"STALE_SHARD_MAP", "SHARD_MAP_INCOMPLETE", "PARTITION_UNKNOWN", "JOB_UNKNOWN"}
)
"""Reasons of errors that a retry of the call may cure: servers are being replaced, or the address
of one of this job's servers now belongs to a different job."""


AnswerT = TypeVar("AnswerT")


def _passes(error: ShoalError) -> bool:
    """Returns whether a call that failed with this error may succeed if it is retried. Returns
    False for a damaged checkpoint file, because nothing will repair it."""
    if isinstance(error, CorruptDataError):
        return error.reason != "FILE_CORRUPT"
    return isinstance(error, UnavailableError | DeadlineError) or error.reason in _PASSING


class RowReader:
    """Reads rows of this job's sparse tables from the parameter servers. May be called from any
    thread."""

    def __init__(
        self, job: Job, shard_map: coordinator_pb.ShardMap, *, patience: timedelta
    ) -> None:
        self._job = job
        self._patience_s = patience.total_seconds()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        """Guards the following attributes."""
        self._map = shard_map
        self._clients: dict[str, ParameterServerClient] = {}
        """Client of each server, by address."""
        self._servers = ThreadPoolExecutor(
            max_workers=max(1, len(shard_map.servers)), thread_name_prefix="shoal-rows"
        )

    def read(self, partitions: Sequence[int], dim: int, ids: Ids) -> LookedUp:
        """Returns the rows with these ids. The ids must be distinct. `partitions`: partitions of
        the table, by bucket number.

        Raises:
            DeadlineError (SERVER_AWAY): a server was unreachable for too long.
            StopTraining: this worker should leave, and a server is unreachable.
            UnavailableError (CLIENT_CLOSED): the tables have been closed.
        """
        places = by_bucket(ids, len(partitions))
        return self.retry_until(lambda: self._read_all(partitions, dim, ids, places))

    def retry_until(self, attempt: Callable[[], AnswerT]) -> AnswerT:
        """Retries a call to servers while a server is unreachable or buckets are moving. Looks up
        the servers' locations before each retry. Raises the same errors as `read`."""
        with self._job.waits.of("parameter servers of sparse tables"):
            return self._retry_until(attempt)

    def _retry_until(self, attempt: Callable[[], AnswerT]) -> AnswerT:
        away_since: float | None = None
        backoff = Backoff(longest_s=_LONGEST_BACKOFF_S)
        while True:
            try:
                if away_since is not None:
                    self.find()
                return attempt()
            except ShoalError as error:
                if self._closed.is_set():
                    raise UnavailableError(
                        "rows of sparse tables are no longer available, because this worker has "
                        "left the job",
                        reason="CLIENT_CLOSED",
                    ) from error
                if not _passes(error):
                    raise
                now = time.monotonic()
                away_since = now if away_since is None else away_since
                if self._job.leaving and now - away_since > _LEAVES_AFTER_S:
                    raise self._job.departure() from error
                if now - away_since > self._patience_s:
                    raise DeadlineError(
                        "could not read rows of a sparse table for more than "
                        f"{self._patience_s:.0f} s (server_timeout): {error}",
                        reason="SERVER_AWAY",
                    ) from error
                self._closed.wait(backoff.next_s(error))

    def find(self) -> bool:
        """Asks the coordinator for the servers' locations, which change when a server restarts or
        buckets move. Returns False if the coordinator is unreachable."""
        found = self._job.shard_map()
        if found is not None:
            with self._lock:
                self._map = found
        return found is not None

    def find_for_certain(self) -> None:
        """Waits until the coordinator has reported the servers' locations.

        A server that has been replaced by its backup may return old data until it learns this. If a
        result seems too old, call this method and read again. Raises the same errors as `read`.
        """

        def ask() -> None:
            if not self.find():
                raise UnavailableError(
                    "could not get the addresses of the parameter servers from the coordinator"
                )

        self.retry_until(ask)

    def server_of(self, partition_id: int) -> tuple[ParameterServerClient, int]:
        """Returns a client of the partition's server, and the shard map's epoch. Raises
        PreconditionError (SHARD_MAP_INCOMPLETE) if the server is not registered."""
        with self._lock:
            shard_map = self._map
        return self._client(_addresses(shard_map, [partition_id])[partition_id]), shard_map.epoch

    def look(self) -> dict[int, pb.PartitionVersion]:
        """Returns the version of each bucket, as reported by its server. Raises the same errors as
        `read`."""

        def look() -> dict[int, pb.PartitionVersion]:
            with self._lock:
                shard_map = self._map
            buckets = [
                each.partition_id for each in shard_map.partitions if each.HasField("bucket")
            ]
            addresses = _addresses(shard_map, buckets)
            held = [
                each
                for address in sorted(set(addresses.values()))
                for each in self._client(address).get_server().partitions
            ]
            found = {each.partition_id: each for each in held if each.partition_id in addresses}
            if missing := addresses.keys() - found.keys():
                raise UnavailableError(
                    f"no parameter server has partitions {sorted(missing)} yet",
                    reason="SHARD_MAP_INCOMPLETE",
                )
            return found

        return self.retry_until(look)

    def read_ahead(self, partitions: Sequence[int], dim: int, ids: Ids) -> Future[LookedUp]:
        """Starts a `read` in the background. Returns a future of its result."""
        return in_background(lambda: self.read(partitions, dim, ids), name="shoal-prefetch")

    def await_ahead(self, read: Future[LookedUp]) -> None:
        """Waits until a read started by `read_ahead` is complete, whether it succeeds or fails.
        Must be called on the training thread."""
        with self._job.waits.collects():
            wait_for_all([read])

    def close(self) -> None:
        """Cancels calls in progress. Idempotent."""
        self._closed.set()
        with self._lock:
            clients = list(self._clients.values())
        for client in clients:
            client.close()
        self._servers.shutdown(wait=False, cancel_futures=True)

    def _read_all(
        self, partitions: Sequence[int], dim: int, ids: Ids, places: Sequence[Ids]
    ) -> LookedUp:
        """Reads all rows in one attempt, without retries."""
        with self._lock:
            shard_map = self._map
        addresses = _addresses(shard_map, partitions)
        values = np.empty((len(ids), dim), dtype=np.float32)
        chosen = dict(zip(partitions, places, strict=True))
        reads = []
        for address in sorted(set(addresses.values())):
            share = {
                partition_id: chosen[partition_id]
                for partition_id in partitions
                if addresses[partition_id] == address
            }
            reads.append((self._client(address), share))
        if len(reads) == 1:
            versions = self._read_server(*reads[0], shard_map.epoch, ids, values)
        else:
            futures = [
                self._servers.submit(self._read_server, client, share, shard_map.epoch, ids, values)
                for client, share in reads
            ]
            try:
                with self._job.waits.collects():
                    wait_for_all(futures)  # even if one has failed: the others write to `values`
            except BaseException:
                # Ctrl-C: the interpreter would wait for the threads before it exits
                self.close()
                raise
            versions = {
                partition_id: version
                for future in futures
                for partition_id, version in future.result().items()
            }
        return LookedUp(values=values, versions=versions)

    def _read_server(
        self,
        client: ParameterServerClient,
        share: Mapping[int, Ids],
        epoch: int,
        ids: Ids,
        values: Values,
    ) -> dict[int, int]:
        """Reads rows from one server's buckets and writes them to `values`. `share`: for each
        bucket, the indices in `ids` of the rows to read. Returns the oldest version read from each
        bucket."""
        versions: dict[int, int] = {}
        at_once = max(1, min(_MOST_BYTES // (4 * values.shape[1]), _MOST_IDS) // len(share))
        for begin in range(0, max(1, *(len(places) for places in share.values())), at_once):
            parts = {
                partition_id: places[begin : begin + at_once]
                for partition_id, places in share.items()
            }
            # A request without ids only returns the bucket's version.
            wanted = {
                partition_id: part for partition_id, part in parts.items() if len(part) or not begin
            }
            versions = self._pull(client, wanted, epoch, ids, values) | versions
        return versions

    def _pull(
        self,
        client: ParameterServerClient,
        wanted: Mapping[int, Ids],
        epoch: int,
        ids: Ids,
        values: Values,
    ) -> dict[int, int]:
        """Sends one request and returns the version of each partition."""
        received = {
            number: np.empty((len(places), values.shape[1]), dtype=np.float32)
            for number, places in wanted.items()
        }
        request = pb.PullRequest(
            job_id=self._job.job_id,
            shard_map_epoch=epoch,
            partitions=[
                pb.PartitionPull(partition_id=number, ids=pulled_ids(ids[places]))
                for number, places in wanted.items()
            ],
            checksums=True,
        )
        headers = client.pull(
            request, lambda header: received[header.partition_id].data, deadline=_STREAM_DEADLINE
        )
        for number, places in wanted.items():
            values[places] = received[number]
        return {header.partition_id: header.version for header in headers}

    def _client(self, address: str) -> ParameterServerClient:
        with self._lock:
            if self._closed.is_set():
                raise UnavailableError(
                    "rows of sparse tables are no longer available, because this worker has left "
                    "the job",
                    reason="CLIENT_CLOSED",
                )
            client = self._clients.get(address)
            if client is None or client.is_closed:  # another server had this address before
                self._clients[address] = self._job.server_client(address)
            return self._clients[address]


def _addresses(shard_map: coordinator_pb.ShardMap, partitions: Sequence[int]) -> dict[int, str]:
    """Returns the address of each partition's server. Raises PreconditionError
    (SHARD_MAP_INCOMPLETE) if a server is not registered."""
    addresses = {server.server_index: server.address for server in shard_map.servers}
    owners = {
        partition_id: shard_map.partitions[partition_id].primary for partition_id in partitions
    }
    if missing := sorted({owner for owner in owners.values() if not addresses.get(owner)}):
        raise PreconditionError(
            f"parameter servers {missing} own partitions but are not registered with the "
            "coordinator",
            reason="SHARD_MAP_INCOMPLETE",
        )
    return {partition_id: addresses[owner] for partition_id, owner in owners.items()}
