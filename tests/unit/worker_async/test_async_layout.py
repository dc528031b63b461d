"""From the coordinator's shard map to the bytes that each server holds."""

from __future__ import annotations

import pytest
import torch
from shoal_common.errors import PreconditionError
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_worker.asynchronous.tensors import HostTensor, shares
from torch import nn


def shard_map(*, addresses: dict[int, str]) -> pb.ShardMap:
    return pb.ShardMap(
        epoch=3,
        tensors=[pb.TensorSpec(name="a", shape=[6], dtype="float32"), pb.TensorSpec(name="b", shape=[2], dtype="float64")],
        partitions=[
            pb.Partition(partition_id=0, tensor_index=0, offset=0, length=4, primary=0),
            pb.Partition(partition_id=1, tensor_index=0, offset=4, length=2, primary=1),
            pb.Partition(partition_id=2, tensor_index=1, offset=0, length=2, primary=1),
        ],
        servers=[pb.ServerStatus(server_index=index, address=address) for index, address in addresses.items()],
    )


def tensors() -> list[HostTensor]:
    a = HostTensor("a", nn.Parameter(torch.arange(6.0)), trained=True)
    b = HostTensor("b", nn.Parameter(torch.tensor([7.0, 8.0], dtype=torch.float64)), trained=True)
    return [a, b]


def test_each_server_gets_its_runs_of_elements() -> None:
    first, second = shares(shard_map(addresses={1: "one:1", 0: "zero:1"}), tensors())
    assert (first.index, first.address, first.epoch) == (0, "zero:1", 3)
    assert [(part.partition_id, part.tensor.name, part.length, part.size_bytes) for part in second.parts] == [
        (1, "a", 2, 8),
        (2, "b", 2, 16),
    ]
    tail, other = second.parts
    assert bytes(tail.of(tail.tensor.values())) == torch.tensor([4.0, 5.0]).numpy().tobytes()
    assert bytes(other.of(other.tensor.values())) == torch.tensor([7.0, 8.0], dtype=torch.float64).numpy().tobytes()


def test_a_server_without_a_part_is_left_alone() -> None:
    assert [share.index for share in shares(shard_map(addresses={0: "a:1", 1: "b:1", 2: "c:1"}), tensors())] == [0, 1]


def test_a_map_that_names_no_address_for_a_part_is_refused() -> None:
    with pytest.raises(PreconditionError, match=r"the servers \[1\]") as refusal:
        shares(shard_map(addresses={0: "a:1"}), tensors())
    assert refusal.value.reason == "SHARD_MAP_INCOMPLETE"
