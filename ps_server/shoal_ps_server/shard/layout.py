"""One server's part of the coordinator's shard map. Immutable values; this module does not
communicate with the coordinator."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType

import torch
from shoal_common.errors import InternalError
from shoal_common.formats import codecs
from shoal_common.tables.declaration import TableSpec, wrong_shape
from shoal_protos.v1 import coordinator_pb2

from shoal_ps_server.shard.dtypes import BY_NAME, ElementType


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A range of elements of one flattened tensor."""

    tensor: str
    """Name of the tensor."""
    offset: int
    """Index of the first element in the flattened tensor."""
    length: int
    """Number of elements; at least 1."""
    row: int = 1
    """Number of elements per index of the tensor's first dimension. 1 for a tensor with at most one
    dimension, and for a frozen tensor, because no optimizer uses its rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """One bucket of a sparse table: the rows whose ids hash to the same bucket number."""

    table: str
    """Name of the table."""
    rows: int
    """Exclusive upper bound of the ids; 0: any 64-bit id is allowed."""
    dim: int
    """Number of elements in a row."""
    number: int
    """Index of the bucket in its table."""
    spec: TableSpec


@dataclass(frozen=True, kw_only=True)
class PartitionSpec:
    """Consecutive pieces of tensors of one element type, or a bucket of a sparse table. A partition
    has one owner and one version, and changes atomically."""

    partition_id: int
    pieces: tuple[Piece, ...]
    """Pieces of the partition. Empty for a bucket, whose length and size are variable and therefore
    given as 0."""
    element: ElementType
    bucket: Bucket | None = None

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Index of each piece's first element in the partition's values. The last entry is the end
        of the last piece."""
        return (0, *accumulate(piece.length for piece in self.pieces))

    @property
    def length(self) -> int:
        """Total number of elements of all pieces."""
        return self.starts[-1]

    @property
    def nbytes(self) -> int:
        """Size of the partition's values in bytes."""
        return self.length * self.element.itemsize

    def length_without(self, absent: Collection[int]) -> int:
        """Returns the total number of elements of all pieces except those at the positions
        `absent`."""
        return self.length - sum(self.pieces[position].length for position in absent)

    def shapes_without(self, absent: Collection[int]) -> tuple[tuple[int, int], ...]:
        """Returns the number of rows and columns, as codecs define them, of each piece except those
        at the positions `absent`."""
        missing = frozenset(absent)
        return tuple(
            codecs.piece_shape(offset=piece.offset, length=piece.length, row=piece.row)
            for position, piece in enumerate(self.pieces)
            if position not in missing
        )

    def without(self, values: torch.Tensor, absent: Collection[int]) -> torch.Tensor:
        """Returns `values` without the pieces at the positions `absent`: the same memory if there
        are none, otherwise a copy."""
        if not absent:
            return values
        missing = frozenset(absent)
        parts = values.split([piece.length for piece in self.pieces])
        return torch.cat([part for position, part in enumerate(parts) if position not in missing])

    def name_of(self, element: int, absent: Collection[int] = ()) -> str:
        """Returns a human-readable name of an element: its tensor and its index in that tensor.

        `element`: index in the values without the pieces at the positions `absent`.
        """
        missing = frozenset(absent)
        for position, piece in enumerate(self.pieces):
            if position not in missing:
                if element < piece.length:
                    return f"element {piece.offset + element} of tensor {piece.tensor!r}"
                element -= piece.length
        raise IndexError(element)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One server's part of an epoch of the shard map."""

    epoch: int
    """Epoch of the shard map; at least 1."""
    server_index: int
    partitions: Mapping[int, PartitionSpec]
    """Partitions of this server by id, ascending."""
    owners: Mapping[int, int]
    """Partition id -> index of the server that owns it, for all partitions of the job. Used in
    errors about requests sent to the wrong server."""
    tensors: frozenset[str]
    """Names of all tensors of the job."""
    frozen: frozenset[str] = frozenset()
    """Names of the tensors that are not trained. Members do not report clocks for them."""


def layout_from_shard_map(shard_map: coordinator_pb2.ShardMap, *, server_index: int) -> Layout:
    """Returns one server's part of a shard map.

    Raises InternalError if the map is inconsistent: it comes from the coordinator, never from a
    user.
    """
    partitions: dict[int, PartitionSpec] = {}
    owners: dict[int, int] = {}
    for partition in sorted(shard_map.partitions, key=lambda each: each.partition_id):
        owners[partition.partition_id] = partition.primary
        if partition.primary == server_index:
            partitions[partition.partition_id] = _partition(shard_map, partition)
    return Layout(
        epoch=shard_map.epoch,
        server_index=server_index,
        partitions=MappingProxyType(partitions),
        owners=MappingProxyType(owners),
        tensors=frozenset(tensor.name for tensor in shard_map.tensors),
        frozen=frozenset(tensor.name for tensor in shard_map.tensors if tensor.frozen),
    )


def _partition(
    shard_map: coordinator_pb2.ShardMap, partition: coordinator_pb2.Partition
) -> PartitionSpec:
    where = f"shard map epoch {shard_map.epoch}: partition {partition.partition_id}"
    if partition.HasField("bucket"):
        return PartitionSpec(
            partition_id=partition.partition_id,
            pieces=(),
            element=BY_NAME["float32"],
            bucket=_bucket(where, shard_map, partition.bucket),
        )
    pieces = []
    dtypes = set()
    for piece in partition.pieces:
        if not 0 <= piece.tensor_index < len(shard_map.tensors):
            raise InternalError(f"{where} contains unknown tensor {piece.tensor_index}")
        if piece.length < 1:
            raise InternalError(
                f"{where} has a piece of {piece.length} elements; expected at least 1"
            )
        tensor = shard_map.tensors[piece.tensor_index]
        dtypes.add(tensor.dtype)
        row = 1 if tensor.frozen else math.prod(tensor.shape[1:])
        pieces.append(Piece(tensor=tensor.name, offset=piece.offset, length=piece.length, row=row))
    if len(dtypes) != 1 or not dtypes <= BY_NAME.keys():
        raise InternalError(
            f"{where} has elements of {', '.join(sorted(dtypes)) or 'no tensor'}; expected one of "
            f"{', '.join(BY_NAME)}"
        )
    return PartitionSpec(
        partition_id=partition.partition_id, pieces=tuple(pieces), element=BY_NAME[dtypes.pop()]
    )


def _bucket(
    where: str, shard_map: coordinator_pb2.ShardMap, bucket: coordinator_pb2.Bucket
) -> Bucket:
    if not 0 <= bucket.tensor_index < len(shard_map.tensors) or not shard_map.tensors[
        bucket.tensor_index
    ].HasField("table"):
        raise InternalError(
            f"{where} is a bucket of tensor {bucket.tensor_index}, which is not a table"
        )
    tensor = shard_map.tensors[bucket.tensor_index]
    spec = TableSpec.of_message(tensor.table)
    problem = wrong_shape(tuple(tensor.shape)) or spec.contradiction()
    if problem or not 0 <= bucket.number < spec.buckets:
        raise InternalError(
            f"{where} is bucket {bucket.number} of table {tensor.name!r}: "
            f"{problem or f'the table has {spec.buckets} buckets'}"
        )
    return Bucket(
        table=tensor.name,
        rows=tensor.shape[0],
        dim=tensor.shape[1],
        number=bucket.number,
        spec=spec,
    )
