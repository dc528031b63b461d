"""Divides a model's tensors into partitions and assigns them to parameter servers. Pure
functions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from shoal_common.tables.declaration import TableSpec

LARGEST_PIECE_BYTES: Final = 8 << 20
SMALLEST_FULL_BYTES: Final = 64 << 10
"""Size in bytes at which a partition's fixed cost equals the cost of its bytes."""
PARTITIONS_PER_SERVER: Final = 4
"""Minimum number of partitions per server, if the tensors are large enough. A server can then apply
one partition while it receives the next, and all servers get equal shares."""
MOST_PIECES: Final = 1 << 17
"""Maximum number of pieces. With pieces of the maximum size, this allows a model of a terabyte; it
limits the shard map's message to a few MiB."""

ITEM_BYTES: Final = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""Bytes per element, by numpy's name of the dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Declaration of one tensor of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Data type of the elements, a key of ITEM_BYTES."""
    frozen: bool = False
    """True if the tensor is in no optimizer. It then never receives a gradient."""
    apart: bool = False
    """True if the tensor must not share a partition with other tensors."""
    table: TableSpec | None = None
    """Declaration of a sparse table, whose shape is [rows, dim], with rows = 0 if any 64-bit id is
    allowed. A table is divided into buckets of rows instead of ranges of elements. None for other
    tensors."""

    @property
    def nbytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A range of elements of one flattened tensor."""

    tensor_index: int
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """The rows of a sparse table whose ids hash to the same bucket."""

    tensor_index: int
    number: int
    """Index of the bucket, 0 to TableSpec.buckets - 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Pieces of tensors with the same dtype, or a bucket of a sparse table. The position in
    ShardLayout.partitions is the partition's id."""

    pieces: tuple[Piece, ...]
    """Pieces of the partition; empty for a bucket of a sparse table."""
    primary: int
    """Index (server_index) of the place that owns the partition."""
    bucket: Bucket | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Number and size of the partitions that one server owns."""

    partitions: int
    nbytes: int
    """Size of the values in bytes, without optimizer state."""


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """Assignment of a model's partitions to parameter servers."""

    epoch: int
    """Number of this assignment, from 1. It increases whenever the owner of a partition changes."""
    tensors: tuple[TensorSpec, ...]
    partitions: tuple[Partition, ...]
    """All partitions: first ranges of dense tensors, which together cover each element once, then
    the buckets of tables. A tensor without elements is in no partition."""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Size of each partition's values in bytes. For a bucket of a sparse table, its expected
        final size, at most 8 MiB."""
        items = [ITEM_BYTES[tensor.dtype] for tensor in self.tensors]

        def size(partition: Partition) -> int:
            if partition.bucket is None:
                return sum(piece.length * items[piece.tensor_index] for piece in partition.pieces)
            tensor = self.tensors[partition.bucket.tensor_index]
            assert tensor.table is not None
            whole = -(-tensor.nbytes // tensor.table.buckets)
            return min(whole, LARGEST_PIECE_BYTES) if whole else LARGEST_PIECE_BYTES

        return tuple(map(size, self.partitions))

    @cached_property
    def shares(self) -> Mapping[int, Share]:
        """Share of each server, by index. Omits servers that own no partition."""
        shares: dict[int, Share] = {}
        for partition, size in zip(self.partitions, self.sizes, strict=True):
            before = shares.get(partition.primary, Share(partitions=0, nbytes=0))
            shares[partition.primary] = Share(
                partitions=before.partitions + 1, nbytes=before.nbytes + size
            )
        return shares

    def is_frozen(self, partition: Partition) -> bool:
        """Returns whether the tensors of a partition are never trained. In a partition, either all
        tensors or none are frozen."""
        return partition.bucket is None and self.tensors[partition.pieces[0].tensor_index].frozen

    def moved(self, partition_ids: Collection[int], receiver: int) -> ShardLayout:
        """Returns the layout of the next epoch, in which `receiver` owns the given partitions."""
        partitions = list(self.partitions)
        for partition_id in partition_ids:
            partitions[partition_id] = replace(partitions[partition_id], primary=receiver)
        return replace(self, epoch=self.epoch + 1, partitions=tuple(partitions))


def count_pieces(tensors: Sequence[TensorSpec]) -> int:
    """Returns the number of pieces and buckets that `lay_out` will create."""
    return sum(
        -(-tensor.elements // _longest(tensor)) if tensor.table is None else tensor.table.buckets
        for tensor in tensors
    )


def lay_out(tensors: Sequence[TensorSpec], servers: Sequence[int]) -> ShardLayout:
    """Divides tensors into partitions, and assigns each partition, beginning with the largest, to
    the server with the fewest bytes so far.

    Tensors of the same dtype are packed together, in the order in which they were declared. Tensors
    above 8 MiB are split, at row boundaries unless a single row exceeds 8 MiB. A partition is full
    at 8 MiB. In a smaller model it is already full at a quarter of a server's share, but not below
    64 KiB.

    Frozen tensors cost nothing in a step. They are therefore packed and assigned separately, so
    that the trained tensors are spread evenly across all servers. For trained and for frozen
    tensors, the loads of two servers differ by at most the size of one partition.

    All buckets of a table grow at the same rate, so they are assigned to all servers in turn; the
    next table continues with the server after the last one. The layout is a deterministic function
    of the arguments.

    Args:
        tensors: the declared tensors.
        servers: server indices, at least one, distinct and ascending.
    """
    partitions: list[Partition] = []
    for frozen in (False, True):
        kind = [
            index
            for index, tensor in enumerate(tensors)
            if tensor.frozen is frozen and tensor.table is None
        ]
        share = -(-sum(tensors[index].nbytes for index in kind) // len(servers))
        full = min(
            LARGEST_PIECE_BYTES,
            max(min(SMALLEST_FULL_BYTES, share), share // PARTITIONS_PER_SERVER),
        )
        together: dict[tuple[str, int], list[int]] = {}
        for index in kind:
            together.setdefault(
                (tensors[index].dtype, index if tensors[index].apart else -1), []
            ).append(index)
        packed: list[tuple[int, tuple[Piece, ...]]] = []  # bytes, pieces
        for (dtype, _), alike in together.items():
            pieces = (piece for index in alike for piece in _cut(index, tensors[index]))
            packed += _pack(pieces, item_bytes=ITEM_BYTES[dtype], full=full)
        # The emptiest server comes first. Among equally empty servers, frozen tensors go to the
        # last one, which has the fewest trained tensors.
        loads = [(0, -server if frozen else server) for server in servers]
        heapq.heapify(loads)
        primaries = [0] * len(packed)
        for position in sorted(range(len(packed)), key=lambda p: (-packed[p][0], p)):
            load, server = loads[0]
            heapq.heapreplace(loads, (load + packed[position][0], server))
            primaries[position] = abs(server)
        partitions += [
            Partition(pieces=pieces, primary=primary)
            for (_, pieces), primary in zip(packed, primaries, strict=True)
        ]
    buckets = [
        Bucket(tensor_index=index, number=number)
        for index, tensor in enumerate(tensors)
        if tensor.table is not None
        for number in range(tensor.table.buckets)
    ]
    partitions += [
        Partition(pieces=(), primary=servers[place % len(servers)], bucket=bucket)
        for place, bucket in enumerate(buckets)
    ]
    return ShardLayout(epoch=1, tensors=tuple(tensors), partitions=tuple(partitions))


def _longest(tensor: TensorSpec) -> int:
    """Returns the maximum number of elements in a piece of a tensor."""
    longest = LARGEST_PIECE_BYTES // ITEM_BYTES[tensor.dtype]
    row = math.prod(tensor.shape[1:])
    return longest - longest % row if 0 < row <= longest else longest


def _cut(index: int, tensor: TensorSpec) -> Iterator[Piece]:
    longest = _longest(tensor)
    for offset in range(0, tensor.elements, longest):
        yield Piece(
            tensor_index=index, offset=offset, length=min(longest, tensor.elements - offset)
        )


def _pack(
    pieces: Iterator[Piece], *, item_bytes: int, full: int
) -> Iterator[tuple[int, tuple[Piece, ...]]]:
    """Groups consecutive pieces until a partition is full. Yields each group with its size in
    bytes."""
    together: list[Piece] = []
    nbytes = 0
    for piece in pieces:
        size = piece.length * item_bytes
        if together and nbytes + size > full:
            yield nbytes, tuple(together)
            together, nbytes = [], 0
        together.append(piece)
        nbytes += size
    if together:
        yield nbytes, tuple(together)
