"""Rows of sparse tables in a checkpoint: each rank writes some of them, any number of buckets can
read them, and changed files are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

import numpy as np
import pytest
from shoal_common.errors import CorruptDataError
from shoal_common.tables.declaration import TableSpec
from shoal_common.tables.file import BucketImage, read_bucket
from shoal_common.tables.rows import RowsImage
from shoal_common.tables.values import buckets_of
from shoal_worker.checkpoint.rows import SavedRows, described, file_name, write_rows

IDS = np.arange(-200, 200)
NAMES = ("users", "which words/they use")


def spec(buckets: int) -> TableSpec:
    return TableSpec.with_defaults(
        buckets=buckets,
        seed=0,
        initializer="normal",
        scale=0.1,
        optimizer="adagrad",
        hyperparameters={"lr": 0.1},
    )


def image(table: str, number: int, buckets: int) -> BucketImage:
    """Returns rows whose values are computed from their ids."""
    ids = IDS[buckets_of(IDS, buckets) == number]
    values = np.repeat(ids, 2).reshape(-1, 2).astype(np.float32)
    rows = RowsImage(ids=ids, values=values, state={"sum": values * 2}, updated_at=np.abs(ids))
    return BucketImage(table=table, number=number, buckets=buckets, version=300, rows=rows)


class Store:
    """The rows of two tables."""

    steady = True

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets

    def declared(self) -> dict[str, Any]:
        about = {"num_embeddings": None, "embedding_dim": 2, "spec": spec(self.buckets).to_json()}
        return dict.fromkeys(NAMES, about)

    def fetch(self, table: str, bucket: int, file: BinaryIO, given_up: Event) -> int:
        found = image(table, bucket, self.buckets)
        file.writelines(found.encoded().parts)
        return found.version


def saved(path: Path, buckets: int, ranks: int = 3) -> SavedRows:
    store: Any = Store(buckets)
    shares = [write_rows(path, store, share=(rank, ranks)) for rank in range(ranks)]
    assert sum(len(files) for share in shares for files in share.values()) == 2 * buckets
    return SavedRows.of(path, {"rows": described(store, shares)})


def pieces(found: Any) -> Iterator[bytes]:
    return map(bytes, found.chunks())


@pytest.mark.parametrize("buckets", [1, 2, 3, 4, 5, 8, 12])
def test_any_number_of_buckets_can_be_rebuilt_from_any_other(tmp_path: Path, buckets: int) -> None:
    found = saved(tmp_path, 4)
    found.check(Store(buckets).declared())
    for table in NAMES:
        for number in range(buckets):
            bucket = found.bucket(table, number, buckets)
            data = b"".join(pieces(bucket))
            assert data == b"".join(image(table, number, buckets).encoded().parts)
            assert (bucket.nbytes, bucket.checksum) == (
                len(data),
                image(table, number, buckets).encoded().checksum(),
            )
            assert (
                found.version(table, number, buckets)
                == read_bucket(memoryview(data)).version
                == 300
            )


def test_table_of_any_name_has_its_own_files() -> None:
    names = ["users", "a/b", "a_b", "a b", "ü", "x" * 512, "x" * 511, "..", "user-clicks"]
    files = {file_name(name, 0, 4) for name in names}
    assert len(files) == len(names)
    assert "rows-users-00001-of-00004" in files
    assert all("/" not in name and len(name) < 120 for name in files)


@pytest.mark.parametrize("at", [0, 100, -1])
def test_changed_file_is_refused(tmp_path: Path, at: int) -> None:
    found = saved(tmp_path, 2)
    file = tmp_path / f"{file_name('users', 1, 2)}.safetensors"
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    found.verify_share((0, 2))
    with pytest.raises(CorruptDataError, match="does not match its digest"):
        found.verify_share((1, 2))
    with pytest.raises(CorruptDataError, match="does not match its digest"):
        found.verify()


def test_missing_file_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    found = saved(tmp_path, 2)
    (tmp_path / f"{file_name('users', 0, 2)}.safetensors").unlink()
    with pytest.raises(CorruptDataError, match="cannot be read"):
        SavedRows.of(tmp_path, {"rows": found.tables})
    del found.tables["users"]["files"]["0"]
    with pytest.raises(KeyError):
        SavedRows.of(tmp_path, {"rows": found.tables})
