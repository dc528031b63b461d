"""Interfaces for saving and restoring the rows of sparse tables. The rows are on parameter servers,
in buckets. Each bucket is read and replaced as a unit.

The protocols connect the servers' client (`sparse_tables/server_rows.py`) with the code for files
(`checkpoint/rows.py`). `checkpoint/saving.py` documents which ranks call what, and in which order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from threading import Event
from typing import Any, BinaryIO, Protocol


class StoredBucket(Protocol):
    """File of one bucket of rows, in the format of shoal_common/tables/file.py."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def checksum(self) -> int:
        """xxh3-64 digest of the file's bytes."""

    def chunks(self) -> Iterator[memoryview]:
        """Yields the file's bytes in pieces of at most 1 MiB; may be called more than once."""


class StoredRows(Protocol):
    """Rows of all sparse tables in a checkpoint."""

    @property
    def nbytes(self) -> int:
        """Total size of all files."""

    def version(self, table: str, bucket: int, buckets: int) -> int:
        """Returns the version of a bucket. `buckets`: the table's current number of buckets."""

    def bucket(self, table: str, number: int, buckets: int) -> StoredBucket:
        """Returns a bucket: a file of the checkpoint, or a bucket assembled from several files.
        `buckets`: the table's current number of buckets. Raises CorruptDataError."""

    def verify(self) -> None:
        """Reads all files. Raises CorruptDataError if a file differs from what was written."""


class RowStore(Protocol):
    """Rows of the model's sparse tables on the servers that train them. May be used by only one
    thread at a time."""

    @property
    def steady(self) -> bool:
        """True if rows change only in steps that all ranks take together. All ranks can then read
        their shares of the rows between steps. If False, rows may change at any time, and a bucket
        is saved as it is when it is read."""

    def declared(self) -> Mapping[str, Mapping[str, Any]]:
        """Returns the declarations of all tables: table name -> JSON object with num_embeddings,
        embedding_dim and spec."""

    def settle(self) -> None:
        """Blocks until the servers have received all pushes of the last step."""

    def fetch(self, table: str, bucket: int, file: BinaryIO, given_up: Event) -> int:
        """Writes a bucket to `file` and returns the bucket's version.

        Raises:
            DeadlineError (SERVER_AWAY): a server was unreachable for too long.
            MembershipChanged: the caller has set `given_up`, which aborts the read."""

    def lacks(self, stored: StoredRows) -> bool:
        """Returns whether the servers lack rows that `begin_with` would send. Allowed only if
        `steady` is False. Raises the same errors as `fetch`."""

    def begin_with(self, stored: StoredRows) -> None:
        """Sends the stored rows to servers that have not trained the table yet. Allowed only if
        `steady` is False. Must be called on all ranks. Blocks until the servers have the rows.

        Raises:
            CorruptDataError: files are damaged, and nothing was sent.
            DeadlineError: a server was unreachable for too long, or rank 0 did not send the rows.
        """

    def expected(self, stored: StoredRows, captured: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the state that the engine will capture under the key "tables" once these rows are
        restored. Allowed only if `steady` is True. `captured`: the current state under that key."""

    def next_restoration(self) -> int:
        """Returns the number of the next restoration, which is higher than the numbers of all
        earlier ones. Raises the same errors as `fetch`."""

    def put(
        self, stored: StoredRows, share: tuple[int, int], restoration: int, given_up: Event
    ) -> None:
        """Restores this rank's share of all buckets on the servers. `share`: this rank, and the
        number of ranks. `restoration`: result of `next_restoration`. Raises the same errors as
        `fetch`."""
