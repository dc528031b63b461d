"""The file of a bucket: other tools can read it, it is read back unchanged, and other files are
refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from shoal_common.tables.file import BucketImage, read_bucket
from shoal_common.tables.rows import RowsImage

ROWS = RowsImage(
    ids=np.array([-5, 7, 1 << 40]),
    values=np.arange(12, dtype=np.float32).reshape(3, 4),
    state={"sum": np.ones((3, 4), np.float32), "count": np.full(3, 2, np.float32)},
    updated_at=np.array([1, 9, 3]),
)
IMAGE = BucketImage(table="users", number=2, buckets=5, version=10, rows=ROWS)


def encoded(image: BucketImage) -> bytes:
    return b"".join(image.encoded().parts)


@pytest.mark.parametrize("count", [3, 0])
def test_file_is_readable_by_safetensors_and_read_back_unchanged(
    tmp_path: Path, count: int
) -> None:
    rows = RowsImage(
        ids=ROWS.ids[:count],
        values=ROWS.values[:count],
        state={name: array[:count] for name, array in ROWS.state.items()},
        updated_at=ROWS.updated_at[:count],
    )
    image = replace(IMAGE, rows=rows)
    data = image.encoded()
    path = tmp_path / "bucket.safetensors"
    path.write_bytes(b"".join(data.chunks(17)))
    assert path.stat().st_size == data.nbytes
    with safetensors.safe_open(path, framework="np") as opened:
        assert opened.metadata() == {
            "table": "users",
            "bucket": "2",
            "buckets": "5",
            "version": "10",
        }
    arrays = {
        "ids": rows.ids,
        "rows": rows.values,
        "updated_at": rows.updated_at,
        "state/sum": rows.state["sum"],
        "state/count": rows.state["count"],
    }
    loaded = safetensors.numpy.load_file(path)
    assert loaded.keys() == arrays.keys()
    back = read_bucket(memoryview(path.read_bytes()))
    assert (back.table, back.number, back.buckets, back.version) == ("users", 2, 5, 10)
    assert encoded(back) == path.read_bytes()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)


def test_truncated_and_incomplete_files_are_refused() -> None:
    data = encoded(IMAGE)
    for end in range(len(data)):
        with pytest.raises(ValueError, match=r"\w"):
            read_bucket(memoryview(data[:end]))
    with pytest.raises(ValueError, match="its header and tensors take"):
        read_bucket(memoryview(data + b"x"))
    begin = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:begin])
    for change in (
        {"ids": None},
        {"rows": {**entries["rows"], "dtype": "F64"}},
        {"rows": {**entries["rows"], "shape": [3, 5]}},
        {"rows": {**entries["rows"], "shape": [-3, -4]}},
        {"rows": {**entries["rows"], "data_offsets": [0, 48]}},
        {"__metadata__": {"table": "users"}},
        {"__metadata__": {**entries["__metadata__"], "version": "0"}},
        {"__metadata__": {**entries["__metadata__"], "version": "x"}},
    ):
        wrong = {name: value for name, value in {**entries, **change}.items() if value is not None}
        header = json.dumps(wrong).encode()
        with pytest.raises(ValueError, match=r"\w"):
            read_bucket(memoryview(len(header).to_bytes(8, "little") + header + data[begin:]))
