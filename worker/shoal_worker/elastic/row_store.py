"""The rows of a model's sparse tables, as checkpoints see them: on parameter servers, in buckets
that are read and put in place whole.

Two protocols, between what knows servers (`asynchronous/row_store.py`) and what knows files
(`checkpoint/rows.py`). Who calls what, and on how many ranks, is said in `checkpoint/saving.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from threading import Event
from typing import Any, BinaryIO, Protocol


class StoredBucket(Protocol):
    """One bucket's file (shoal_common/tables/file.py)."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    @property
    def checksum(self) -> int:
        """xxh3-64 of its bytes."""

    def chunks(self) -> Iterator[memoryview]:
        """Its bytes, in pieces of at most 1 MiB; as often as they are wanted."""


class StoredRows(Protocol):
    """The rows of all tables, in a checkpoint."""

    @property
    def nbytes(self) -> int:
        """Size of all files."""

    def version(self, table: str, bucket: int, buckets: int) -> int:
        """What the version of a bucket is, of so many that the table has now."""

    def bucket(self, table: str, number: int, buckets: int) -> StoredBucket:
        """A bucket, of so many that the table has now: a file of the checkpoint, or made of
        several. Raises CorruptDataError."""

    def verify(self) -> None:
        """Reads all files. Raises CorruptDataError for one that is not as it was written."""


class RowStore(Protocol):
    """The rows of the model's tables, where they are trained. May be used on one thread at a time,
    of any name."""

    @property
    def steady(self) -> bool:
        """The rows change with steps that all ranks take together. So between steps they are those
        of the step, and all ranks can share in reading them. False: each bucket is of the moment
        when it is read."""

    def declared(self) -> Mapping[str, Mapping[str, Any]]:
        """Table -> what it was declared with, JSON-able: num_embeddings, embedding_dim, spec."""

    def settle(self) -> None:
        """Returns when the servers have all that the last step pushes."""

    def fetch(self, table: str, bucket: int, file: BinaryIO, given_up: Event) -> int:
        """Writes a bucket's file; returns its version.

        Raises:
            DeadlineError (SERVER_AWAY): a server was away for too long.
            MembershipChanged: `given_up` is set.
        """

    def lacks(self, stored: StoredRows) -> bool:
        """Not steady: whether there are rows that `begin_with` would give. Raises as `fetch`."""

    def begin_with(self, stored: StoredRows) -> None:
        """Not steady: gives these rows to servers on which nobody has trained the table. On all
        ranks: returns when the servers have them.

        Raises:
            CorruptDataError: files are damaged, and nothing was given.
            DeadlineError: a server was away for too long, or rank 0 gave none.
        """

    def expected(self, stored: StoredRows, captured: Mapping[str, Any] | None) -> dict[str, Any]:
        """Steady: what the engine's captured state is to have under "tables" when these rows are
        put in place. `captured`: what it has."""

    def next_restoration(self) -> int:
        """A number above that of all restorations before it. Raises as `fetch`."""

    def put(
        self, stored: StoredRows, share: tuple[int, int], restoration: int, given_up: Event
    ) -> None:
        """Puts rank's share of all buckets in place: rank, and of how many. Raises as `fetch`."""
