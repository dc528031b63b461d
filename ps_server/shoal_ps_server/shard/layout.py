"""Which partitions a server holds, as the coordinator's shard map says. Plain values; nothing here talks to the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shoal_common.errors import InternalError
from shoal_protos.v1 import coordinator_pb2

from shoal_ps_server.shard.dtypes import BY_NAME, ElementType


@dataclass(frozen=True, kw_only=True)
class PartitionSpec:
    """A run of elements of one flattened tensor: the unit of ownership, of atomicity and of versions."""

    partition_id: int
    tensor: str
    """Name of the tensor it is cut from."""
    offset: int
    """First element within the flattened tensor."""
    length: int
    """Elements."""
    element: ElementType

    @property
    def nbytes(self) -> int:
        """Size of its values in bytes."""
        return self.length * self.element.itemsize


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One epoch of the shard map, as one server needs it."""

    epoch: int
    """The shard map's; >= 1."""
    server_index: int
    partitions: Mapping[int, PartitionSpec]
    """Those that this server holds, by partition id, ascending."""
    owners: Mapping[int, int]
    """Every partition of the job -> server index of its primary: to tell a misdirected request where to go."""
    tensors: frozenset[str]
    """Names of all tensors of the job, whoever holds them."""

    def same_partitions(self, other: Layout) -> bool:
        """True when both give this server the same runs of the same tensors, so that values held under one are right under the other."""
        return dict(self.partitions) == dict(other.partitions)


def layout_from_shard_map(shard_map: coordinator_pb2.ShardMap, *, server_index: int) -> Layout:
    """The part of a shard map that concerns one server.

    Raises InternalError where the map contradicts itself: it comes from the coordinator, never from a user.
    """
    partitions: dict[int, PartitionSpec] = {}
    owners: dict[int, int] = {}
    for partition in sorted(shard_map.partitions, key=lambda each: each.partition_id):
        if not 0 <= partition.tensor_index < len(shard_map.tensors):
            raise InternalError(
                f"shard map epoch {shard_map.epoch}: partition {partition.partition_id} names tensor {partition.tensor_index}"
            )
        tensor = shard_map.tensors[partition.tensor_index]
        element = BY_NAME.get(tensor.dtype)
        if element is None:
            raise InternalError(
                f"shard map epoch {shard_map.epoch}: tensor {tensor.name!r} has dtype {tensor.dtype!r}, which is no known one"
            )
        owners[partition.partition_id] = partition.primary
        if partition.primary == server_index:
            partitions[partition.partition_id] = PartitionSpec(
                partition_id=partition.partition_id,
                tensor=tensor.name,
                offset=partition.offset,
                length=partition.length,
                element=element,
            )
    return Layout(
        epoch=shard_map.epoch,
        server_index=server_index,
        partitions=MappingProxyType(partitions),
        owners=MappingProxyType(owners),
        tensors=frozenset(tensor.name for tensor in shard_map.tensors),
    )
