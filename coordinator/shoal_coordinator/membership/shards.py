"""How a model's tensors are cut into partitions and spread over parameter servers. Pure values and one pure function."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LARGEST_PARTITION_BYTES: Final = 8 << 20
MOST_PARTITIONS: Final = 1 << 17
"""A terabyte in the largest partitions; also bounds the shard map's message to a few MiB."""

ITEM_BYTES: Final = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""Bytes of one element, by numpy's name of the dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One declared tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """A key of ITEM_BYTES."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A run of elements of one flattened tensor; its id is its position in ShardLayout.partitions."""

    tensor_index: int
    offset: int
    length: int
    primary: int
    """server_index of its owner."""


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """Who owns what."""

    epoch: int
    """>= 1; grows at every change of an owner."""
    tensors: tuple[TensorSpec, ...]
    partitions: tuple[Partition, ...]
    """By tensor, then offset; together they cover each element once. A tensor without elements has none."""


def count_partitions(tensors: Sequence[TensorSpec]) -> int:
    """How many partitions `lay_out` will make."""
    return sum(-(-tensor.elements // _largest_length(tensor)) for tensor in tensors)


def lay_out(tensors: Sequence[TensorSpec], servers: int) -> ShardLayout:
    """Cuts tensors into partitions of at most 8 MiB and gives each to the server with the fewest bytes so far, largest partitions first.

    So no server holds more than one partition's bytes above another. Equal input gives an equal layout.
    """
    cuts: list[tuple[int, int, int, int]] = []  # bytes, tensor index, offset, length
    for tensor_index, tensor in enumerate(tensors):
        longest, item_bytes = _largest_length(tensor), ITEM_BYTES[tensor.dtype]
        for offset in range(0, tensor.elements, longest):
            length = min(longest, tensor.elements - offset)
            cuts.append((length * item_bytes, tensor_index, offset, length))
    loads = [(0, server) for server in range(servers)]
    primaries = [0] * len(cuts)
    for position in sorted(range(len(cuts)), key=lambda p: (-cuts[p][0], p)):
        load, server = loads[0]
        heapq.heapreplace(loads, (load + cuts[position][0], server))
        primaries[position] = server
    return ShardLayout(
        epoch=1,
        tensors=tuple(tensors),
        partitions=tuple(
            Partition(tensor_index=tensor_index, offset=offset, length=length, primary=primary)
            for (_, tensor_index, offset, length), primary in zip(cuts, primaries, strict=True)
        ),
    )


def _largest_length(tensor: TensorSpec) -> int:
    return LARGEST_PARTITION_BYTES // ITEM_BYTES[tensor.dtype]
