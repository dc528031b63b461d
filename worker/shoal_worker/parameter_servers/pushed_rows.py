"""Rows of sparse tables, for `server_link.py` and `tensors.py`: a push of rows, and the partitions
that are buckets of tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shoal_common.formats.wire import DtypeInfo, dtype_info
from shoal_protos.v1 import coordinator_pb2 as coordinator_pb

ROWS_DTYPE: Final = dtype_info("float32")
"""Data type of rows and their gradients."""


@dataclass(frozen=True, kw_only=True)
class PushedRows:
    """The rows that a step pushes to one bucket. Every attempt sends the same bytes."""

    partition_id: int
    version: int
    """Version of the rows used to compute the gradients."""
    rows: int
    length: int
    """Number of elements of the gradients."""
    data: memoryview
    dtype: DtypeInfo = ROWS_DTYPE


def buckets_of_servers(shard_map: coordinator_pb.ShardMap) -> dict[int, tuple[int, ...]]:
    """Returns the partitions that are buckets of tables, by server index. Servers without buckets
    are omitted."""
    found: dict[int, tuple[int, ...]] = {}
    for partition in shard_map.partitions:
        if partition.HasField("bucket"):
            found[partition.primary] = (*found.get(partition.primary, ()), partition.partition_id)
    return found
