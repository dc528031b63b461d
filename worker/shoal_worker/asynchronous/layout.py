"""Which part of which tensor lies on which server, as the coordinator's shard map says. Plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal_common.errors import PreconditionError
from shoal_common.wire import DtypeInfo
from shoal_protos.v1 import coordinator_pb2 as coordinator_pb

from shoal_worker.asynchronous.tensors import HostTensor


@dataclass(frozen=True, kw_only=True)
class Part:
    """A partition: a run of elements of one tensor, the unit that is pushed and pulled."""

    partition_id: int
    tensor: HostTensor
    begin: int
    """First byte in the tensor's memory."""
    length: int
    """Elements."""

    @property
    def dtype(self) -> DtypeInfo:
        """Element type of the tensor that this is a part of."""
        return self.tensor.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the partition."""
        return self.length * self.dtype.item_bytes

    def of(self, memory: memoryview) -> memoryview:
        """This part of the tensor's memory, or of memory laid out like it."""
        return memory[self.begin : self.begin + self.size_bytes]


@dataclass(frozen=True, kw_only=True)
class ServerShare:
    """What one server holds."""

    index: int
    address: str
    """host:port when the map was read; a restarted server may have another one."""
    epoch: int
    """The shard map's."""
    parts: tuple[Part, ...]


def shares(shard_map: coordinator_pb.ShardMap, tensors: Sequence[HostTensor]) -> tuple[ServerShare, ...]:
    """The servers that hold something, by index.

    Raises:
        PreconditionError (SHARD_MAP_INCOMPLETE): a partition's server is not registered.
    """
    by_name: Mapping[str, HostTensor] = {tensor.name: tensor for tensor in tensors}
    parts: dict[int, list[Part]] = {}
    for partition in shard_map.partitions:
        tensor = by_name[shard_map.tensors[partition.tensor_index].name]
        part = Part(
            partition_id=partition.partition_id,
            tensor=tensor,
            begin=partition.offset * tensor.dtype.item_bytes,
            length=partition.length,
        )
        parts.setdefault(partition.primary, []).append(part)
    addresses = {server.server_index: server.address for server in shard_map.servers}
    missing = sorted(parts.keys() - addresses.keys())
    if missing:
        raise PreconditionError(
            f"the shard map gives partitions to the servers {missing}, but names only {sorted(addresses)}; restart the job's parameter "
            "servers",
            reason="SHARD_MAP_INCOMPLETE",
        )
    return tuple(
        ServerShare(index=index, address=addresses[index], epoch=shard_map.epoch, parts=tuple(parts[index])) for index in sorted(parts)
    )
