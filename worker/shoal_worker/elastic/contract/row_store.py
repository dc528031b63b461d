"""Rows of a model's sparse tables from the perspective of checkpoints: on parameter servers, in
buckets that are read and replaced as a unit.

Two protocols between the client of the servers (`sparse_tables/server_rows.py`) and the code for
files (`checkpoint/rows.py`). The order of calls, and the ranks that make them, are documented in
`checkpoint/saving.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from threading import Event
from typing import Any, BinaryIO, Protocol


class StoredBucket(Protocol):
    """File of one bucket (shoal_common/tables/file.py)."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def checksum(self) -> int:
        """xxh3-64 of its bytes."""

    def chunks(self) -> Iterator[memoryview]:
        """Yields its bytes in pieces of at most 1 MiB; may be called repeatedly."""


class StoredRows(Protocol):
    """Rows of all tables in a checkpoint."""

    @property
    def nbytes(self) -> int:
        """Total size of all files."""

    def version(self, table: str, bucket: int, buckets: int) -> int:
        """Returns the version of a bucket, given the table's current number of buckets."""

    def bucket(self, table: str, number: int, buckets: int) -> StoredBucket:
        """Returns a bucket, given the table's current number of buckets: a file of the checkpoint,
        or one assembled from several. Raises CorruptDataError."""

    def verify(self) -> None:
        """Reads all files. Raises CorruptDataError if one differs from what was written."""


class RowStore(Protocol):
    """Rows of the model's tables where they are trained. Used by one thread at a time."""

    @property
    def steady(self) -> bool:
        """True if the rows change only with steps that all ranks take together, so that between
        steps all ranks can share in reading them. False: each bucket is from the moment when it is
        read."""

    def declared(self) -> Mapping[str, Mapping[str, Any]]:
        """Returns table -> its JSON-able declaration: num_embeddings, embedding_dim, spec."""

    def settle(self) -> None:
        """Returns when the servers have received everything that the last step pushes."""

    def fetch(self, table: str, bucket: int, file: BinaryIO, given_up: Event) -> int:
        """Writes a bucket's file; returns its version.

        Raises:
            DeadlineError (SERVER_AWAY): a server was away for too long.
            MembershipChanged: `given_up` is set.
        """

    def lacks(self, stored: StoredRows) -> bool:
        """Returns whether `begin_with` would add rows. Only if not steady. Raises like `fetch`."""

    def begin_with(self, stored: StoredRows) -> None:
        """Sends these rows to servers on which nobody has trained the table. Only if not steady.
        Called on all ranks; returns when the servers have them.

        Raises:
            CorruptDataError: files are damaged, and nothing was sent.
            DeadlineError: a server was away for too long, or rank 0 sent none.
        """

    def expected(self, stored: StoredRows, captured: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the engine's captured state under "tables" after these rows are restored. Only if
        steady. `captured`: the current one."""

    def next_restoration(self) -> int:
        """Returns a number above that of all earlier restorations. Raises like `fetch`."""

    def put(
        self, stored: StoredRows, share: tuple[int, int], restoration: int, given_up: Event
    ) -> None:
        """Restores this rank's share of all buckets. `share`: rank and number of ranks. Raises like
        `fetch`."""
