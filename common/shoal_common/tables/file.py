"""File of one bucket of a sparse table, in the safetensors format. It is exchanged with a parameter
server and stored in checkpoints.

Tensors: `ids` (int64, ascending), `updated_at` (int64: the step in which each row was last
updated), `rows` (float32, `[n, dim]`), and the optimizer's state per row, `state/NAME` (float32,
`[n, dim]` or `[n]`). Metadata: `table`, `bucket` (index of the bucket), `buckets` (number of
buckets of the table), and `version`, which is one more than the number of pushes to the bucket.
This module writes the format itself, to avoid copying arrays. Parsing is strict. Any safetensors
tool can read the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from shoal_common.tables.rows import RowsImage

_INT64, _FLOAT32 = np.dtype("<i8"), np.dtype("<f4")
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {"I64": _INT64, "F32": _FLOAT32}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER: Final = 1 << 20
_STATE: Final = "state/"


@dataclass(frozen=True, kw_only=True)
class BucketImage:
    """State of a bucket of a sparse table at one moment."""

    table: str
    number: int
    """Index of the bucket among the table's `buckets`."""
    buckets: int
    version: int
    rows: RowsImage

    def encoded(self) -> EncodedBucket:
        """Encodes the bucket as a file, which shares memory with the rows."""
        arrays: dict[str, npt.NDArray[Any]] = {
            "ids": self.rows.ids,
            "updated_at": self.rows.updated_at,
            "rows": self.rows.values,
        }
        arrays |= {f"{_STATE}{name}": array for name, array in self.rows.state.items()}
        metadata = {
            "table": self.table,
            "bucket": str(self.number),
            "buckets": str(self.buckets),
            "version": str(self.version),
        }
        entries: dict[str, Any] = {"__metadata__": metadata}
        position = 0
        for name, array in arrays.items():
            end = position + array.nbytes
            dtype = _NAMES[array.dtype.newbyteorder("<")]
            entries[name] = {
                "dtype": dtype,
                "shape": list(array.shape),
                "data_offsets": [position, end],
            }
            position = end
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)  # the format asks for aligned data
        opening = memoryview(len(header).to_bytes(8, "little") + header)
        return EncodedBucket(parts=(opening, *(_bytes_of(array) for array in arrays.values())))


@dataclass(frozen=True, kw_only=True)
class EncodedBucket:
    """An encoded bucket file, as a sequence of buffers that are not copied."""

    parts: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Total size of the file in bytes."""
        return sum(part.nbytes for part in self.parts)

    def checksum(self) -> int:
        """Returns the xxh3-64 of all bytes of the file."""
        digest = xxhash.xxh3_64()
        for part in self.parts:
            digest.update(part)
        return int(digest.intdigest())

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Yields all bytes of the file in pieces of at most `size` bytes."""
        for part in self.parts:
            for start in range(0, part.nbytes, size):
                yield part[start : start + size]


def read_bucket(data: memoryview) -> BucketImage:
    """Parses a bucket file created by `BucketImage.encoded`. The arrays are views of `data`. Raises
    ValueError for invalid data."""
    try:
        begin = 8 + int.from_bytes(data[:8], "little")
        if begin > min(data.nbytes, 8 + _LONGEST_HEADER):
            raise ValueError(
                f"the file declares a header of {begin - 8} bytes; expected at most "
                f"{_LONGEST_HEADER}, and no more than the file's {data.nbytes} bytes"
            )
        entries = json.loads(bytes(data[8:begin]))
        metadata = entries.pop("__metadata__")
        arrays: dict[str, npt.NDArray[Any]] = {}
        at = 0
        for name, entry in sorted(entries.items(), key=lambda each: tuple(each[1]["data_offsets"])):
            first, end = map(int, entry["data_offsets"])
            dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
            if (
                first != at
                or min(shape, default=-1) < 0
                or math.prod(shape) * dtype.itemsize != end - first
                or begin + end > data.nbytes
            ):
                raise ValueError(
                    f"tensor {name!r} of shape {shape} has invalid offsets in the header"
                )
            arrays[name] = np.frombuffer(data[begin + first : begin + end], dtype=dtype).reshape(
                shape
            )
            at = end
        if begin + at != data.nbytes:
            raise ValueError(
                f"the file has {data.nbytes} bytes, but its header and tensors take {begin + at}"
            )
        image = BucketImage(
            table=str(metadata["table"]),
            number=int(metadata["bucket"]),
            buckets=int(metadata["buckets"]),
            version=int(metadata["version"]),
            rows=RowsImage(
                ids=arrays.pop("ids"),
                values=arrays.pop("rows"),
                updated_at=arrays.pop("updated_at"),
                state={name.removeprefix(_STATE): array for name, array in arrays.items()},
            ),
        )
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"a field of the bucket is missing or invalid: {error!r}") from error
    if image.version < 1:
        raise ValueError(f"version={image.version}: expected 1 or more")
    return image


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B") if array.nbytes else memoryview(b"")
