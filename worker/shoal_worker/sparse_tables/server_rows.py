"""Reads entire buckets of a model's sparse tables from the job's parameter servers for checkpoints,
and restores them from a checkpoint.

A bucket is streamed piece by piece through this process, between a server and a file. Each
restoration of rows has a number, so that a server applies it only once, even if it is sent several
times or by several ranks. The number is higher than those of all restorations in earlier
generations, and of all restorations known to the servers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, BinaryIO, Final

from shoal_common.errors import DeadlineError, MembershipChanged
from shoal_common.failpoints import failpoint
from shoal_protos.v1 import parameter_server_pb2 as pb
from typing_extensions import override

from shoal_worker.elastic.contract.row_store import StoredBucket, StoredRows
from shoal_worker.parameter_servers.coordination.job import Job
from shoal_worker.sparse_tables.embedding import SparseEmbedding
from shoal_worker.sparse_tables.row_reader import RowReader

_RESTORATIONS_OF_A_GENERATION: Final = 1 << 32
_SLOWEST_BYTES_PER_S: Final = 4 << 20
"""Assumed transfer rate for the deadline of a stream, in bytes per second. A minute is added to
that deadline."""
_LARGEST_BUCKET: Final = 256 << 20
_LOOK_S: Final = 0.2
"""Interval between checks whether rank 0 has provided the initial rows, in seconds."""


class ServerRowStore:
    """Implements `RowStore` (elastic/contract/row_store.py) for async_sgd. `StepRowStore` is the
    variant for ranks that take steps together."""

    steady = False

    def __init__(
        self,
        job: Job,
        reader: RowReader,
        tables: Sequence[SparseEmbedding],
        partitions: Mapping[str, Sequence[int]],
    ) -> None:
        """`partitions`: partitions of each table, by bucket number."""
        self._job = job
        self._reader = reader
        self._tables = {table.name: table for table in tables}
        self._partitions = partitions

    def declared(self) -> dict[str, dict[str, Any]]:
        """Implements `RowStore.declared`."""
        return {
            name: {
                "num_embeddings": table.num_embeddings,
                "embedding_dim": table.embedding_dim,
                "spec": table.spec.to_json(),
            }
            for name, table in self._tables.items()
        }

    def settle(self) -> None:
        """Does nothing, because there are no pending pushes to wait for."""

    def fetch(self, table: str, bucket: int, file: BinaryIO, given_up: threading.Event) -> int:
        """Implements `RowStore.fetch`."""
        partition_id = self._partitions[table][bucket]

        def read() -> int:
            _check(given_up)
            file.seek(0)
            file.truncate()
            client, epoch = self._reader.server_of(partition_id)
            request = pb.ReadRowsRequest(
                job_id=self._job.job_id, shard_map_epoch=epoch, partition_id=partition_id
            )
            return client.read_rows(
                request, file.write, deadline=_deadline(_LARGEST_BUCKET)
            ).version

        return self._reader.retry_until(read)

    # ----------------------------------------------------------------------- first rows (async_sgd)

    def lacks(self, stored: StoredRows) -> bool:
        """Implements `RowStore.lacks`."""
        return bool(self._untouched(stored))

    def begin_with(self, stored: StoredRows) -> None:
        """Implements `RowStore.begin_with`. Ranks other than 0 wait for rank 0."""
        gives_s = stored.nbytes / _SLOWEST_BYTES_PER_S
        deadline = time.monotonic() + self._job.patience.total_seconds() + gives_s
        while untouched := self._untouched(stored):
            if self._job.rank == 0:
                stored.verify()
                for table, bucket in untouched:
                    self._put(stored, table, bucket, 0, threading.Event())
                    failpoint("rows.put")
                return
            if self._job.leaving:
                return
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"rank 0 did not send the parameter servers bucket {untouched[0][1]} of "
                    f"table {untouched[0][0]!r}, which is in the checkpoint, within "
                    f"{self._job.patience.total_seconds() + gives_s:.0f} s; check that rank 0 "
                    "resumes from a directory that all ranks share",
                    reason="VALUES_MISSING",
                )
            time.sleep(_LOOK_S)

    def _untouched(self, stored: StoredRows) -> list[tuple[str, int]]:
        """Returns the buckets that have rows in the checkpoint but have neither been trained nor
        restored on the servers."""
        held = self._reader.look()
        return [
            (table, bucket)
            for table, bucket, partition_id in self._all_buckets()
            if held[partition_id].version == 1
            and not held[partition_id].restoration
            and stored.version(table, bucket, len(self._partitions[table])) > 1
        ]

    # --------------------------------------------------------------------------- restorations (ddp)

    def expected(self, stored: StoredRows, captured: Mapping[str, Any] | None) -> dict[str, Any]:
        """Implements `RowStore.expected`: returns the argument of `ServerStepTables.restore`."""
        versions = {
            str(partition_id): stored.version(table, bucket, len(self._partitions[table]))
            for table, bucket, partition_id in self._all_buckets()
        }
        return {
            "next_key": captured["next_key"] if captured else 0,
            "versions": versions,
            "pending": None,
        }

    def next_restoration(self) -> int:
        """Implements `RowStore.next_restoration`."""
        last = max(each.restoration for each in self._reader.look().values())
        return max(self._job.generation * _RESTORATIONS_OF_A_GENERATION, last + 1)

    def put(
        self,
        stored: StoredRows,
        share: tuple[int, int],
        restoration: int,
        given_up: threading.Event,
    ) -> None:
        """Implements `RowStore.put`."""
        rank, ranks = share
        for table, bucket, _ in self._all_buckets()[rank::ranks]:
            self._put(stored, table, bucket, restoration, given_up)
            failpoint("rows.put")

    def _put(
        self,
        stored: StoredRows,
        table: str,
        number: int,
        restoration: int,
        given_up: threading.Event,
    ) -> None:
        partition_id = self._partitions[table][number]
        bucket = stored.bucket(table, number, len(self._partitions[table]))

        def put() -> None:
            _check(given_up)
            client, epoch = self._reader.server_of(partition_id)
            header = self._header(partition_id, epoch, bucket, restoration)
            client.restore_rows(header, bucket.chunks(), deadline=_deadline(bucket.nbytes))

        self._reader.retry_until(put)

    def _header(
        self, partition_id: int, epoch: int, bucket: StoredBucket, restoration: int
    ) -> pb.RowsHeader:
        return pb.RowsHeader(
            partition_id=partition_id,
            payload_bytes=bucket.nbytes,
            checksum=bucket.checksum,
            job_id=self._job.job_id,
            member_id=self._job.member_id,
            generation=self._job.generation,
            shard_map_epoch=epoch,
            restoration=restoration,
        )

    def _all_buckets(self) -> list[tuple[str, int, int]]:
        """Returns all buckets as tuples of table name, bucket number and partition."""
        return [
            (table, number, partition_id)
            for table, partitions in sorted(self._partitions.items())
            for number, partition_id in enumerate(partitions)
        ]


class StepRowStore(ServerRowStore):
    """Row store for ranks that take steps together. Between steps, reads return the rows as of the
    last step."""

    steady = True

    def __init__(
        self,
        job: Job,
        reader: RowReader,
        tables: Sequence[SparseEmbedding],
        partitions: Mapping[str, Sequence[int]],
        *,
        settle: Callable[[], None],
        expected: Callable[[int], int],
        found: Callable[[Mapping[int, int]], None],
    ) -> None:
        """`settle`: blocks until the servers have received the entire last step. `expected`:
        returns the version that a partition has then, or 0 if it is not known. `found`: called with
        the versions that have been read."""
        super().__init__(job, reader, tables, partitions)
        self._settle = settle
        self._expected_version = expected
        self._found = found

    @override
    def settle(self) -> None:
        self._settle()

    def fetch(self, table: str, bucket: int, file: BinaryIO, given_up: threading.Event) -> int:
        """Implements `RowStore.fetch`. If the rows are older than expected, looks up the servers'
        locations and reads again, because the server may have been replaced. In either case, calls
        `found` with the version that was read."""
        partition_id = self._partitions[table][bucket]
        version = super().fetch(table, bucket, file, given_up)
        if version < self._expected_version(partition_id):
            self._reader.find_for_certain()
            version = super().fetch(table, bucket, file, given_up)
        self._found({partition_id: version})
        return version


def _check(given_up: threading.Event) -> None:
    if given_up.is_set():
        raise MembershipChanged("the reading or restoring of buckets was abandoned")


def _deadline(nbytes: int) -> timedelta:
    return timedelta(seconds=60 + nbytes / _SLOWEST_BYTES_PER_S)
