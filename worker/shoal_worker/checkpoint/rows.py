"""The rows of sparse tables in a checkpoint: one file for each bucket, read from the servers and
sent to them one bucket at a time.

    step-1200/
      checkpoint.json                              under "rows": each table's declaration, and of
                                                   each file its size, digest and version
      rows-users-00001-of-00016.safetensors        a bucket, in the format of
                                                   shoal_common/tables/file.py
      ...

No process has more than one bucket in memory: data from a server is written directly to the disk,
and vice versa. Ids are assigned to buckets by a hash. If a table is declared with a different
number of buckets, each new bucket is formed from the old buckets that have ids in common with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any, Final

import numpy as np
import xxhash
from shoal_common.errors import CorruptDataError
from shoal_common.failpoints import failpoint
from shoal_common.optimizers.for_servers import TABLE_OPTIMIZERS
from shoal_common.tables.file import BucketImage, EncodedBucket, read_bucket
from shoal_common.tables.rows import RowsImage
from shoal_common.tables.values import buckets_of

from shoal_worker.checkpoint.manifest import (
    SUFFIX,
    damaged,
    describe_file,
    disk_errors,
    file_of,
    verify_file,
)
from shoal_worker.elastic.contract.row_store import RowStore, StoredBucket

_CHUNK: Final = 1 << 20
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Files = dict[str, dict[str, Any]]
"""Each file's entry for the manifest, by table and bucket (as a string)."""


def file_name(table: str, number: int, buckets: int) -> str:
    """Returns the name of a bucket's file, without its suffix."""
    if not _PLAIN.fullmatch(table):
        digest = xxhash.xxh3_64_hexdigest(table.encode())
        table = f"{re.sub(r'[^A-Za-z0-9_.]', '_', table)[:40]}_{digest}"
    return f"rows-{table}-{number + 1:05d}-of-{buckets:05d}"


# ------------------------------------------------------------------------------------------ writing


def write_rows(
    temporary: Path,
    store: RowStore,
    *,
    share: tuple[int, int] = (0, 1),
    given_up: Event | None = None,
) -> dict[str, Files]:
    """Writes a rank's share of all buckets and waits until their files are on the disk. Returns the
    files' entries for the manifest, by table. `share`: rank and number of ranks. `given_up`: set by
    the caller to stop early.

    Raises:
        UnavailableError (CHECKPOINT_NOT_WRITTEN): the disk is full or failing.
        Exception: any error of `RowStore.fetch`.
    """
    rank, ranks = share
    given_up = given_up or Event()
    written: dict[str, Files] = {}
    for place, (table, number, buckets) in enumerate(_all_buckets(store)):
        if place % ranks != rank:
            continue
        path = temporary / f"{file_name(table, number, buckets)}{SUFFIX}"
        with disk_errors(path), path.open("wb") as file:
            version = store.fetch(table, number, file, given_up)
        with disk_errors(path):
            written.setdefault(table, {})[str(number)] = describe_file(path) | {"version": version}
        failpoint("rows.written")
    return written


def described(store: RowStore, shares: Sequence[Mapping[str, Files]]) -> dict[str, Any]:
    """Returns the manifest's entry for all tables. `shares`: results of `write_rows` on all
    ranks."""
    content: dict[str, Any] = {
        table: {"declared": dict(declared), "files": {}}
        for table, declared in store.declared().items()
    }
    for written in shares:
        for table, files in written.items():
            content[table]["files"] |= files
    return content


def _all_buckets(store: RowStore) -> list[tuple[str, int, int]]:
    """Returns all buckets as tuples of table name, bucket number, and the table's number of
    buckets."""
    counts = {
        table: int(declared["spec"]["buckets"]) for table, declared in store.declared().items()
    }
    return [
        (table, number, buckets)
        for table, buckets in sorted(counts.items())
        for number in range(buckets)
    ]


# ------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True, kw_only=True)
class SavedRows:
    """The rows of all tables in a checkpoint. Implements `StoredRows`
    (elastic/contract/row_store.py)."""

    path: Path
    """Path of the checkpoint."""
    tables: Mapping[str, Any]
    """The manifest's entry for the tables, as returned by the function `described`."""

    @classmethod
    def of(cls, path: Path, content: Mapping[str, Any]) -> SavedRows:
        """Creates an instance from a manifest.

        Raises:
            CorruptDataError: a file is missing or has a different size.
            KeyError, TypeError, ValueError, AttributeError: the manifest is invalid.
        """
        saved = cls(path=path, tables=content.get("rows", {}))
        for table in saved.tables:
            for number in range(saved._buckets(table)):
                file_of(path, *saved._file(table, number))
        return saved

    def files(self) -> dict[str, Mapping[str, Any]]:
        """Returns each file's entry for the manifest, by the file's name without suffix."""
        return dict(
            self._file(table, number)
            for table in self.tables
            for number in range(self._buckets(table))
        )

    @property
    def nbytes(self) -> int:
        """Total size of all files, in bytes."""
        return sum(
            int(about["bytes"]) for each in self.tables.values() for about in each["files"].values()
        )

    def check(self, declared: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises CorruptDataError unless the stored tables match `declared` (`RowStore.declared`).
        The number of buckets, limits and hyperparameters may differ."""
        if differing := declared.keys() ^ self.tables.keys():
            name = min(differing)
            what = (
                "has no rows for table {!r} of the model"
                if name in declared
                else "has rows of table {!r}, which the model lacks"
            )
            raise CorruptDataError(
                f"checkpoint {self.path} {what.format(name)}; resume with the model that saved "
                "it, or from another checkpoint",
                reason="MODEL_DIFFERS",
            )
        for name, now in declared.items():
            then = self.tables[name]["declared"]
            _check_same(self.path, name, then, now)

    def version(self, table: str, bucket: int, buckets: int) -> int:
        """Implements `StoredRows.version`. If the number of buckets has changed since the
        checkpoint was saved, returns the newest of the saved versions; under ddp, they are all the
        same."""
        if buckets == self._buckets(table):
            return int(self._file(table, bucket)[1]["version"])
        return max(int(about["version"]) for about in self.tables[table]["files"].values())

    def bucket(self, table: str, number: int, buckets: int) -> StoredBucket:
        """Implements `StoredRows.bucket`."""
        if buckets != self._buckets(table):
            return _Made(self._made(table, number, buckets).encoded())
        name, about = self._file(table, number)
        return _InFile(
            file=file_of(self.path, name, about),
            nbytes=int(about["bytes"]),
            checksum=int(about["xxh3_64"], 16),
        )

    def verify(self) -> None:
        """Implements `StoredRows.verify`. Does nothing if the files have been verified before."""
        _ = self._is_verified

    @cached_property
    def _is_verified(self) -> bool:
        self.verify_share((0, 1))
        return True

    def verify_share(self, share: tuple[int, int], given_up: Event | None = None) -> None:
        """Verifies a rank's share of the files. `share`: rank and number of ranks. `given_up`: set
        by the caller to stop early."""
        rank, ranks = share
        every = [
            (table, number)
            for table in sorted(self.tables)
            for number in range(self._buckets(table))
        ]
        for table, number in every[rank::ranks]:
            if given_up is not None and given_up.is_set():
                return
            verify_file(self.path, *self._file(table, number))

    def _made(self, table: str, number: int, buckets: int) -> BucketImage:
        """Assembles one bucket of a table whose number of buckets differs from that in the
        checkpoint. Reads all files that may contain ids of this bucket."""
        before = self._buckets(table)
        step = math.gcd(before, buckets)
        parts = []
        for source in range(number % step, before, step):
            rows = self._read(table, source).rows
            mine = np.flatnonzero(buckets_of(rows.ids, buckets) == number)
            parts.append(_chosen(rows, mine))
        rows = _joined(parts)
        return BucketImage(
            table=table,
            number=number,
            buckets=buckets,
            version=self.version(table, number, buckets),
            rows=rows,
        )

    def _read(self, table: str, number: int) -> BucketImage:
        name, about = self._file(table, number)
        try:
            return read_bucket(memoryview(file_of(self.path, name, about).read_bytes()))
        except (OSError, ValueError) as error:
            raise damaged(self.path, f"{name}{SUFFIX} cannot be read: {error}") from error

    def _file(self, table: str, number: int) -> tuple[str, Mapping[str, Any]]:
        about: Mapping[str, Any] = self.tables[table]["files"][str(number)]
        return file_name(table, number, self._buckets(table)), about

    def _buckets(self, table: str) -> int:
        return int(self.tables[table]["declared"]["spec"]["buckets"])


@dataclass(frozen=True, kw_only=True)
class _InFile:
    """A `StoredBucket` that is read from a file of the checkpoint."""

    file: Path
    nbytes: int
    checksum: int

    def chunks(self) -> Iterator[memoryview]:
        """Implements `StoredBucket.chunks`. Raises CorruptDataError."""
        try:
            with self.file.open("rb") as opened:
                while piece := opened.read(_CHUNK):
                    yield memoryview(piece)
        except OSError as error:
            raise damaged(self.file.parent, f"{self.file.name} cannot be read: {error}") from error


@dataclass(frozen=True)
class _Made:
    """A `StoredBucket` assembled from the rows of other buckets."""

    data: EncodedBucket

    @property
    def nbytes(self) -> int:
        """Size in bytes; see `StoredBucket`."""
        return self.data.nbytes

    @cached_property
    def checksum(self) -> int:
        """Checksum; see `StoredBucket`."""
        return self.data.checksum()

    def chunks(self) -> Iterator[memoryview]:
        """Implements `StoredBucket.chunks`."""
        return self.data.chunks(_CHUNK)


def _check_same(path: Path, name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for what in ("embedding_dim", "seed", "initializer", "scale"):
        before, declared = (
            each[what] if what in each else each["spec"][what] for each in (then, now)
        )
        if before != declared:
            raise CorruptDataError(
                f"checkpoint {path} has table {name!r} with {what}={before!r}, but the model "
                f"declares {declared!r}; declare the table as it was",
                reason="MODEL_DIFFERS",
            )
    before, declared = then["num_embeddings"], now["num_embeddings"]
    if declared is not None and (before is None or before > declared):
        raise CorruptDataError(
            f"checkpoint {path} has table {name!r} with num_embeddings={before}, but the model "
            f"declares {declared}, which excludes some of its ids; declare at least as many",
            reason="MODEL_DIFFERS",
        )
    if _optimizer(then) != _optimizer(now):
        raise CorruptDataError(
            f"checkpoint {path} has rows of table {name!r} with optimizer state of "
            f"{then['spec']['optimizer']}, but the model declares {now['spec']['optimizer']}; "
            "declare the optimizer that trained them",
            reason="OPTIMIZER_DIFFERS",
        )


def _optimizer(declared: Mapping[str, Any]) -> tuple[str, int]:
    """Returns the optimizer's name and the size of its state per row."""
    spec = declared["spec"]
    return str(spec["optimizer"]), TABLE_OPTIMIZERS[spec["optimizer"]].state_tensors(
        dict(spec["hyperparameters"])
    )


def _chosen(rows: RowsImage, places: Any) -> RowsImage:
    state = {name: array[places] for name, array in rows.state.items()}
    return RowsImage(
        ids=rows.ids[places],
        values=rows.values[places],
        state=state,
        updated_at=rows.updated_at[places],
    )


def _joined(parts: Sequence[RowsImage]) -> RowsImage:
    """Returns the rows of all parts, sorted by id."""
    ids = np.concatenate([each.ids for each in parts])
    whole = RowsImage(
        ids=ids,
        values=np.concatenate([each.values for each in parts]),
        state={
            name: np.concatenate([each.state[name] for each in parts]) for name in parts[0].state
        },
        updated_at=np.concatenate([each.updated_at for each in parts]),
    )
    return _chosen(whole, np.argsort(ids))
